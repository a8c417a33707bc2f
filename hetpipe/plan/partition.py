"""BaPipe's balanced partition between layers, for a fixed order of devices (BaPipe, section 3.3).

Letters: T_n time of the whole network on device n, T ideal stage time, N stages, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetpipe.plan.costs import Array
from hetpipe.plan.exact import stage_times


def balanced(costs: Sequence[Array], whole_s: Sequence[float]) -> tuple[int, ...]:
    """Places cuts by T = 1 / sum(1 / T_n), then moves boundary layers while that helps.

    `costs[n][lo, hi]` as in `exact`, `whole_s[n]` = T_n. A move helps if it lowers the slowest
    stage, or keeps it and lowers the next slowest, so that two equally slow stages are no dead end.
    It ends where no move helps, which may be above the optimum: `exact` is the other candidate.
    """
    cuts, layers = _placed(costs, whole_s), costs[0].shape[0] - 1
    times = _order(costs, cuts)
    while True:
        best = min(moves(cuts, layers), key=lambda moved: _order(costs, moved), default=cuts)
        if _order(costs, best) >= times:
            return cuts
        cuts, times = best, _order(costs, best)


def _placed(costs: Sequence[Array], whole_s: Sequence[float]) -> tuple[int, ...]:
    """Each stage takes layers while it stays within T, and leaves one for each later stage."""
    speed = sum(1 / time_s for time_s in whole_s)
    ideal_s = 1 / speed if speed else float("inf")
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
    """All partitions that differ by one boundary layer and leave no stage empty."""
    ends = (0, *cuts, layers)
    for index in range(1, len(ends) - 1):
        for cut in (ends[index] - 1, ends[index] + 1):
            if ends[index - 1] < cut < ends[index + 1]:
                yield (*ends[1:index], cut, *ends[index + 1 : -1])


def _order(costs: Sequence[Array], cuts: tuple[int, ...]) -> list[float]:
    return sorted(stage_times(costs, cuts), reverse=True)
