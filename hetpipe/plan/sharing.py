"""Sharing: the media (buses, half-duplex links, uplinks, network cards of hosts) that a plan's
messages and sums over replicas occupy. A cluster describes media, or they are measured with links.

If stages have replicas, several pairs of devices send parts of one message, or of one sum, at the
same time. So the busiest medium decides how long the message or sum takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.plan.shares import all_reduce_nbytes
from hetpipe.simulate.times import FREE, StageTimes, Transfer

Way = tuple[str, str]  # sending device, receiving device
ROUNDING = 1e-12  # a smaller share of a cut is a rounding error


def measured_media(plan: Plan, costs: CostTable) -> list[str]:
    """Return the media of a plan that were measured with the links."""
    if not isinstance(costs.links, dict):  # the cluster describes the links
        return []
    ahead = list(pairwise(plan.all_devices))  # all hosts of the plan are an end of one of these
    ways = *ahead, *((there, here) for here, there in ahead)
    links = [costs.links[way] for way in ways if way in costs.links]
    return sorted({medium for link in links for medium in link.media})


def share_media(
    times: StageTimes, plan: Plan, costs: CostTable, cluster: Cluster | None
) -> StageTimes:
    """Return the times, with the media that messages and sums occupy.

    A message between two replicas of one stage (`asp`) occupies the media that all pairs of the
    stage's replicas have in common. Raises `ClusterError` for devices that the cluster lacks.
    """
    if cluster is None and not measured_media(plan, costs):
        return times
    shared = _Shared(plan, costs, cluster)
    stages = range(len(plan.stages))
    sums = tuple(shared.sum_of(plan.stages[n], times.sum_of(n)) for n in stages)
    ahead, back, gradients = times.forward_links, times.backward_links, times.gradient_links
    forwards = [shared.message(link, cut, False) for cut, link in enumerate(ahead)]
    backwards = [shared.message(link, cut, True) for cut, link in enumerate(back)]
    tied = {ends: shared.tied(link, *ends) for ends, link in times.tied.items()}
    among = [shared.gradients(link, n) for n, link in enumerate(gradients)]
    kept = _decisive((*forwards, *backwards, *tied.values(), *sums, *among, *among))

    def contended(transfer: Transfer) -> Transfer:
        return transfer._replace(media=tuple(m for m in transfer.media if m in kept))

    return replace(
        times,
        forward_links=tuple(map(contended, forwards)),
        backward_links=tuple(map(contended, backwards)),
        tied={ends: contended(transfer) for ends, transfer in tied.items()},
        gradient_links=tuple(map(contended, among)),
        all_reduce_s=(),
        sums=tuple(map(contended, sums)),
    )


def _decisive(transfers: Sequence[Transfer]) -> set[str]:
    """Return the media that can decide a transfer's speed, so that a simulation needs no others.

    The speed of a transfer is 1 / the largest number of transfers on any of its media. So a medium
    decides nothing if it has only one transfer, or if another medium has all of its transfers.
    """
    users: dict[str, set[int]] = defaultdict(set)
    for number, transfer in enumerate(transfers):
        for medium in transfer.media:
            users[medium].add(number)
    first = {frozenset(numbers): medium for medium, numbers in reversed(users.items())}
    several = [numbers for numbers in first if len(numbers) > 1]
    return {first[each] for each in several if not any(each < other for other in several)}


class _Shared:
    def __init__(self, plan: Plan, costs: CostTable, cluster: Cluster | None) -> None:
        self.plan, self.costs, self.cluster = plan, costs, cluster

    def _media(self, one: str, other: str) -> tuple[str, ...]:
        """Return the media that a message between two devices occupies."""
        described = self.cluster.way(one, other) if self.cluster else ()
        return *described, *self.costs.link(one, other).media

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
        if self.plan.rule.averages or len(devices) == 1:
            return FREE
        ways = [self._media(a, b) for a in devices for b in devices if a != b]
        media = [medium for medium in ways[0] if all(medium in way for way in ways)]
        return link._replace(media=tuple(media))

    def tied(self, link: Transfer, source: int, target: int) -> Transfer:
        """Return a message between stages that share parameters."""
        devices = self.plan.devices
        return link._replace(media=self._media(devices[source], devices[target]))

    def _link(self, way: Way) -> LinkCost:
        return self.costs.link(*way)

    def _busy_s(self, seconds: Mapping[Way, float]) -> dict[str, float]:
        """Return how long all these parts occupy each medium."""
        busy_s: dict[str, float] = defaultdict(float)
        for way, part_s in seconds.items():
            for medium in self._media(*way):
                busy_s[medium] += part_s
        return busy_s


def crossing(plan: Plan, cut: int) -> dict[tuple[str, str], float]:
    """Return the share of a cut's bytes that each pair of devices moves if replicas divide rows.

    Rows are in the order of the replicas on both sides.
    """
    sides = [list(accumulate(stage.shares, initial=0.0)) for stage in plan.stages[cut : cut + 2]]
    before, after = ([end / ends[-1] for end in ends] for ends in sides)
    shares: dict[tuple[str, str], float] = {}
    senders = zip(plan.stages[cut].devices, pairwise(before), strict=True)
    receivers = zip(plan.stages[cut + 1].devices, pairwise(after), strict=True)
    here, (lo, hi) = next(senders)
    there, (first, last) = next(receivers)
    while True:
        share = min(hi, last) - max(lo, first)
        if share > ROUNDING:
            shares[here, there] = share
        following = next(senders, None) if hi <= last else next(receivers, None)
        if following is None:
            return shares
        if hi <= last:
            here, (lo, hi) = following
        else:
            there, (first, last) = following
