"""Shares of replicas: the rows of each replica, their times, and the sum of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise, permutations
from math import isinf

import numpy as np

from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.division import divide_samples
from hetpipe.plan.costs import StageCosts
from hetpipe.simulate.times import ring_s

BEYOND = 1.25  # extrapolated times are accepted up to this multiple of the largest size


class ReplicaTimes:
    """Seconds of forward and backward of layers lo..hi (hi excluded) on a device, by rows.

    If more rows seem to take less time, this is noise; then they get the time of the fewer rows.
    """

    def __init__(self, costs: Mapping[int, StageCosts], device: str, lo: int, hi: int) -> None:
        self.sizes = sorted(costs)
        passes_s = [costs[size].stage_passes_s(device, lo, hi) for size in self.sizes]
        self._forward_s = list(accumulate([forward_s for forward_s, _, _ in passes_s], max))
        self._backward_s = list(accumulate([backward_s for _, backward_s, _ in passes_s], max))
        self.at = cache(self._at)  # equal replicas have equal rows

    def knows(self, rows: int) -> bool:
        """Whether this number of rows is within the measured sizes or a little above (`BEYOND`)."""
        return self.sizes[0] <= rows <= BEYOND * self.sizes[-1]

    def _at(self, rows: int) -> tuple[float, float]:
        """Return the seconds of forward and backward for this number of rows."""
        return self._line(rows, self._forward_s), self._line(rows, self._backward_s)

    def _line(self, rows: int, times_s: Sequence[float]) -> float:
        if rows == self.sizes[-1] or isinf(times_s[-1]):  # impossible at any size
            return times_s[-1]
        if rows > self.sizes[-1] and len(self.sizes) > 1:
            slope = (times_s[-1] - times_s[-2]) / (self.sizes[-1] - self.sizes[-2])
            return times_s[-1] + slope * (rows - self.sizes[-1])
        return float(np.interp(rows, self.sizes, times_s))


def times_of(
    costs: Mapping[int, StageCosts], devices: Sequence[str], lo: int, hi: int
) -> dict[str, ReplicaTimes]:
    """Return the times of layers lo..hi on each device. Equal devices share one object."""
    kinds = [*zip(*[each.kinds_of(tuple(devices)) for each in costs.values()], strict=True)]
    first = dict(zip(reversed(kinds), reversed(devices), strict=True))
    times = {kind: ReplicaTimes(costs, device, lo, hi) for kind, device in first.items()}
    return dict(zip(devices, map(times.__getitem__, kinds), strict=True))


def fastest_rows(times: Mapping[str, ReplicaTimes], samples: int) -> dict[str, int]:
    """Return the rows of each device that minimise the time of the slowest device.

    The search begins with rows in the ratio of the speeds at equal shares, and moves one row at a
    time from the slowest device.
    """
    if len(times) == 1:
        return dict.fromkeys(times, samples)
    if len(set(map(id, times.values()))) == 1:  # equal devices
        each, more = divmod(samples, len(times))
        return {device: each + (n < more) for n, device in enumerate(times)}
    share = max(1, round(samples / len(times)))
    speeds = [1 / max(sum(each.at(share)), 1e-12) for each in times.values()]
    rows = dict(zip(times, divide_samples(samples, speeds), strict=True))

    def end_s(device: str, more: int = 0) -> float:
        return sum(times[device].at(rows[device] + more))

    while True:
        slowest = max(times, key=end_s)
        quickest = min(times, key=lambda device: end_s(device, 1))
        if end_s(quickest, 1) >= end_s(slowest) or rows[slowest] <= 1:
            break
        rows[slowest] -= 1
        rows[quickest] += 1
    return rows


def all_reduce_s(table: CostTable, devices: Sequence[str], lo: int, hi: int) -> float:
    """Return the seconds in which replicas sum their gradients, with a separate link for each pair.

    On links of this machine r replicas send each other all gradients, and upload the sums, which
    takes twice the time in which a message's ends copy it. On modelled links they sum in a ring, as
    vendors' libraries do: the slowest link carries 2 (r - 1) / r of the bytes.
    """
    nbytes = sum(layer.params_nbytes for layer in table.layers[lo:hi])
    if _is_ring(table, devices):
        ring = table.chain((*devices, devices[0]))
        latency_s = max(link.latency_s for link in ring)
        bandwidth_Bps = min(link.sum_Bps for link in ring)
        return ring_s(len(devices), nbytes, latency_s, bandwidth_Bps)
    seconds = []
    for here in devices:
        links = [table.link(here, there) for there in devices if there != here]
        seconds.append(sum(_sum_s(link, nbytes) for link in links))
    return max(seconds)


def _sum_s(link: LinkCost, nbytes: int) -> float:
    """Return the seconds in which a replica sends its gradients on a link and uploads a sum."""
    return (1 + 2 * copying_share(link)) * (link.latency_s + nbytes / link.sum_Bps)


def copying_share(link: LinkCost) -> float:
    """Return the share of a message's time in which each of its ends copies it."""
    return link.copying if link.label in ("measured", "inferred") else 0.0


def all_reduce_nbytes(
    table: CostTable, devices: Sequence[str], lo: int, hi: int
) -> dict[tuple[str, str], float]:
    """Return, by (sender, receiver), the bytes that replicas send in the sum of `all_reduce_s`."""
    nbytes = sum(layer.params_nbytes for layer in table.layers[lo:hi])
    if _is_ring(table, devices):
        return dict.fromkeys(_hops(devices), 2 * (len(devices) - 1) / len(devices) * nbytes)
    return dict.fromkeys(permutations(devices, 2), float(nbytes))


def _is_ring(table: CostTable, devices: Sequence[str]) -> bool:
    return all(link.label == "modelled" for link in table.chain((*devices, devices[0])))


def _hops(devices: Sequence[str]) -> list[tuple[str, str]]:
    return list(pairwise((*devices, devices[0])))
