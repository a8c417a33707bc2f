"""Sharing: the media of a cluster (buses, half-duplex links, uplinks) that a plan's messages and
sums over replicas occupy.

If stages have replicas, several pairs of devices send parts of one message, or of one sum, at the
same time. So the busiest medium decides how long the message or sum takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.plan.pricing import crossing
from hetpipe.plan.shares import all_reduce_nbytes
from hetpipe.simulate.times import FREE, StageTimes, Transfer

Way = tuple[str, str]  # sending device, receiving device


def share_media(times: StageTimes, plan: Plan, costs: CostTable, cluster: Cluster) -> StageTimes:
    """Return the times, with the media that messages and sums occupy.

    A message between two replicas of one stage (`asp`) occupies the media that all pairs of the
    stage's replicas have in common. Raises `ClusterError` for devices that the cluster lacks.
    """
    shared = _Shared(plan, costs, cluster)
    stages = range(len(plan.stages))
    sums = tuple(shared.sum_of(plan.stages[n], times.sum_of(n)) for n in stages)
    ahead, back, gradients = times.forward_links, times.backward_links, times.gradient_links
    return replace(
        times,
        forward_links=tuple(shared.message(link, cut, False) for cut, link in enumerate(ahead)),
        backward_links=tuple(shared.message(link, cut, True) for cut, link in enumerate(back)),
        tied={ends: shared.tied(link, *ends) for ends, link in times.tied.items()},
        gradient_links=tuple(shared.gradients(link, n) for n, link in enumerate(gradients)),
        all_reduce_s=(),
        sums=sums,
    )


class _Shared:
    def __init__(self, plan: Plan, costs: CostTable, cluster: Cluster) -> None:
        self.plan, self.costs, self.cluster = plan, costs, cluster

    def message(self, link: Transfer, cut: int, is_back: bool) -> Transfer:
        """Return the message at a cut, between all replicas of the two stages."""
        plan = self.plan
        if not plan.rule.flushes:  # replicas take turns, so one pair moves a message
            parts = {(plan.devices[cut], plan.devices[cut + 1]): 1.0}
        else:
            parts = crossing(plan, cut)
        nbytes = {
            (there, here) if is_back else (here, there): part * plan.cut_nbytes[cut]
            for (here, there), part in parts.items()
        }
        busy_s = self._busy_s({way: n / self._link(way).bandwidth_Bps for way, n in nbytes.items()})
        occupancy_s = max([link.occupancy_s, *busy_s.values()])
        return link._replace(media=tuple(busy_s), occupancy_s=occupancy_s)

    def sum_of(self, stage: StagePlan, alone: Transfer) -> Transfer:
        """Return a stage's sum over replicas, with the transfers of all pairs of replicas."""
        if len(stage.devices) == 1:
            return alone
        nbytes = all_reduce_nbytes(self.costs, stage.devices, stage.lo, stage.hi)
        seconds = {way: n / self._link(way).sum_Bps for way, n in nbytes.items()}
        busy_s, slowest_s = self._busy_s(seconds), max(seconds.values())
        if not busy_s:
            return alone
        whole_s = alone.latency_s + alone.occupancy_s
        occupancy_s = max([slowest_s, *busy_s.values()])
        return Transfer(max(whole_s - slowest_s, 0.0), occupancy_s, tuple(busy_s))

    def gradients(self, link: Transfer, number: int) -> Transfer:
        """Return a message from one replica of a stage to another."""
        devices = self.plan.stages[number].devices
        if len(devices) == 1:
            return FREE
        ways = [self.cluster.way(a, b) for a in devices for b in devices if a != b]
        media = [medium for medium in ways[0] if all(medium in way for way in ways)]
        return link._replace(media=tuple(media))

    def tied(self, link: Transfer, source: int, target: int) -> Transfer:
        """Return a message between stages that share parameters."""
        devices = self.plan.devices
        return link._replace(media=self.cluster.way(devices[source], devices[target]))

    def _link(self, way: Way) -> LinkCost:
        return self.costs.link(*way)

    def _busy_s(self, seconds: Mapping[Way, float]) -> dict[str, float]:
        """Return how long all these parts occupy each medium."""
        busy_s: dict[str, float] = defaultdict(float)
        for way, part_s in seconds.items():
            for medium in self.cluster.way(*way):
                busy_s[medium] += part_s
        return busy_s
