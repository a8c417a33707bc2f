"""Partitions between layers for a fixed order of devices: exact, or balanced as in BaPipe.

T_n is the time of the whole model on device n, T the ideal time of a stage. There are N stages and
L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from hetpipe.plan.costs import Array


def exact(costs: Sequence[Array]) -> tuple[int, ...] | None:
    """Return the cuts whose slowest stage is fastest; None if all partitions take infinite time.

    `costs[n][lo, hi]` is the time of layers lo..hi as stage n, infinite where impossible. A dynamic
    programme over (stages placed, layers placed) takes O(N L^2) in numpy: 0.2 ms for 100 layers on
    4 devices. A bisection on the bottleneck takes O(N L) per limit if times are additive and memory
    does not matter; this programme works for any costs. (Pinar, Tabak, Aykanat 2008.)
    """
    slowest = costs[0][0]  # slowest[hi]: time of the slowest stage so far, for layers 0..hi
    choices = []
    for cost in costs[1:]:
        joined = np.maximum(slowest[:, None], cost)
        choices.append(joined.argmin(axis=0))
        slowest = joined.min(axis=0)
    if math.isinf(slowest[-1]):
        return None
    cuts = [len(slowest) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts[1:]))


def bottleneck(costs: Sequence[Array], cuts: Sequence[int]) -> float:
    """Return the seconds of the slowest stage of a partition."""
    return max(stage_times(costs, cuts))


def stage_times(costs: Sequence[Array], cuts: Sequence[int]) -> list[float]:
    """Return the seconds of the stages under `cuts`."""
    ends = [0, *cuts, costs[0].shape[0] - 1]
    return [float(cost[lo, hi]) for cost, lo, hi in zip(costs, ends, ends[1:], strict=False)]


def balance_cuts(costs: Sequence[Array], whole_s: Sequence[float]) -> tuple[int, ...]:
    """Return cuts that are placed by T = 1 / sum(1 / T_n), and then moved by one layer at a time.

    `costs` is the same as for `exact`; `whole_s[n]` = T_n. A move must shorten the slowest stage,
    or keep its time and shorten the next slowest stage; so moves do not end at two equally slow
    stages. The result may be slower than the optimum, so BaPipe also considers the cuts of `exact`.
    """
    cuts, layers = _placed(costs, whole_s), costs[0].shape[0] - 1
    while True:
        partitions = [cuts, *moves(cuts, layers)]
        best = partitions[_quickest(costs, np.array(partitions, int), layers)]
        if best == cuts:
            return cuts
        cuts = best


def ideal_stage_s(whole_s: Sequence[float]) -> float:
    """Return T = 1 / sum(1 / T_n) from the times of the whole model on each device.

    T is 0 if some device takes no time, and infinite if no device can run all layers.
    """
    if not min(whole_s) > 0:
        return 0.0
    speed = sum(1 / time_s for time_s in whole_s)
    return 1 / speed if speed else float("inf")


def _placed(costs: Sequence[Array], whole_s: Sequence[float]) -> tuple[int, ...]:
    """Return cuts that give each stage as many layers as T allows, at least one, and leave at least
    one layer for each later stage."""
    ideal_s = ideal_stage_s(whole_s)
    stages, layers = len(costs), costs[0].shape[0] - 1
    cuts: list[int] = []
    for stage in range(stages - 1):
        lo = cuts[-1] if cuts else 0
        hi = lo + 1
        while hi < layers - (stages - 1 - stage) and costs[stage][lo, hi + 1] <= ideal_s:
            hi += 1
        cuts.append(hi)
    return tuple(cuts)


def moves(cuts: tuple[int, ...], layers: int) -> Iterator[tuple[int, ...]]:
    """Yield all cuts in which one layer moves to a neighbouring stage and no stage is empty."""
    ends = (0, *cuts, layers)
    for index in range(1, len(ends) - 1):
        for cut in (ends[index] - 1, ends[index] + 1):
            if ends[index - 1] < cut < ends[index + 1]:
                yield (*ends[1:index], cut, *ends[index + 1 : -1])


def _quickest(costs: Sequence[Array], cuts: Array, layers: int) -> int:
    """Return the index of the partition whose slowest stage is fastest; `cuts` has a row for each.
    Among equal partitions the next slowest stages decide, and so on; at last the first one wins."""
    ends = np.pad(cuts, ((0, 0), (1, 0)))
    ends = np.pad(ends, ((0, 0), (0, 1)), constant_values=layers)
    times_s = [cost[ends[:, n], ends[:, n + 1]] for n, cost in enumerate(costs)]
    slowest_first = np.sort(times_s, axis=0)[::-1]
    return int(np.lexsort(slowest_first[::-1])[0])
