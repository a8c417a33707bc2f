"""Bisection: the exact partition of large models over many devices in a fixed order.

With prefix sums W of a device's times, and arrive[i] and leave[j] as the seconds of transfers at
the two cuts, layers i..j are a stage of at most T seconds if

    W[j] + leave[j] <= T - overhead + W[i] - arrive[i]                 objective `sum`
    W[j] <= T - overhead + W[i],  arrive[i] <= T,  leave[j] <= T       objective `max`

so one running maximum of the right side gives the cuts that a stage can reach from the cuts that
the stages before it can reach. Only a band of cuts matters: cuts that the first k devices can
reach, and from which the remaining devices can reach the end, if only computation counts. If a
device's memory may be too small, the search tries all pairs of cuts of two bands. Each partition
that it finds lowers T to the time of the partition's slowest stage, until no partition is faster.
So the result is exact, except for rounding of prefix sums. (Pinar, Tabak, Aykanat 2008, for chains
without transfers and memory.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from hetpipe.errors import PlanError
from hetpipe.plan.costs import Array, Objective

STRICTLY = 1 - 1e-12
ROUNDING = 2.0**-49
"""More than all rounding errors of a stage's time, relative to the prefix sums."""

COARSE = 1e-6  # relative precision of the bound by computation alone

NEAR = 2e-3
"""If the lower and the upper limit are relatively this near, every second trial is a limit just
below the best partition's time."""

GALLOP = 4
"""Factor by which the limit moves away from the bound by computation alone, until a partition meets
the limit."""

Partition = TypeVar("Partition")


def bisect_limit(
    best: Partition,
    low_s: float,
    within: Callable[[float], Partition | None],
    slowest_s: Callable[[Partition], float],
    rounding_s: float,
    middle_s: Callable[[float, float], float] = lambda low_s, high_s: (low_s + high_s) / 2,
) -> tuple[float, Partition]:
    """Return the seconds of the slowest stage of the fastest partition, and the partition.

    `best` is a first partition, and no partition is faster than `low_s`. `within` returns a
    partition that meets a limit, or None; `middle_s` chooses the limit to try between two limits.
    The computed seconds of a stage may be wrong by up to `rounding_s`.
    """
    high_s, snapped = slowest_s(best), False
    # A stage of `high_s` seconds cannot meet `faster_s` by a rounding error.
    while low_s < (faster_s := high_s * STRICTLY - rounding_s):
        snapped = not snapped and high_s - low_s <= NEAR * high_s
        trial_s = faster_s if snapped else middle_s(low_s, high_s)
        partition = within(trial_s)
        time_s = math.inf if partition is None else slowest_s(partition)
        if partition is None or time_s >= high_s:  # by rounding, stages may exceed the limit
            low_s = trial_s
        else:
            high_s, best = time_s, partition
    return high_s, best


@dataclass(frozen=True, eq=False)
class Stage:
    """The costs of one stage, for any layers i..j.

    Arrays have an entry for each cut, 0 to L. `compute_s` are prefix sums without the fixed
    `overhead_s`; `arrive_s[i]` and `leave_s[j]` are the seconds of transfers at the stage's two
    cuts. `blocked[i]` is the first layer from i on that the device cannot run. The stage needs
    `nbytes[j] - nbytes[i]` bytes and the `buffers` of both cuts, at most `capacity`. Raises
    `PlanError` for invalid arrays.
    """

    compute_s: Array
    overhead_s: float
    arrive_s: Array
    leave_s: Array
    blocked: Array
    nbytes: Array
    buffers: Array
    capacity: float

    def __post_init__(self) -> None:
        cuts = len(self.compute_s)
        for name in ("compute_s", "nbytes", "arrive_s", "leave_s", "blocked", "buffers"):
            values = getattr(self, name)
            if len(values) != cuts:
                raise PlanError(
                    f"a stage has {len(values)} {name} and {cuts} compute_s: give one for each cut"
                )
            sums = name in ("compute_s", "nbytes")
            if not (values.min() >= 0 and values.max() < math.inf) or (
                sums and (values[1:] < values[:-1]).any()
            ):
                raise PlanError(
                    f"a stage has {name} that are negative, falling or infinite: give sums of "
                    "finite times and bytes; `blocked` tells the layers that it cannot run"
                )

    @cached_property
    def unbounded(self) -> bool:
        """Whether the device can run all layers and has memory for them."""
        need = self.nbytes[-1] + 2 * self.buffers.max()
        return bool(need <= self.capacity and self.blocked[0] == len(self.compute_s) - 1)

    def seconds(self, lo: int, hi: int, objective: Objective) -> float:
        """Return the seconds of layers lo..hi (hi excluded)."""
        compute_s = self.overhead_s + self.compute_s[hi] - self.compute_s[lo]
        if objective == "sum":
            return float(compute_s + self.arrive_s[lo] + self.leave_s[hi])
        return float(max(compute_s, self.arrive_s[lo], self.leave_s[hi]))

    def farthest(self, lo: int, limit_s: float) -> int:
        """Return the last cut that the stage can reach from `lo` if only computation counts; `lo`
        if it reaches no later cut."""
        end_s = limit_s - self.overhead_s + self.compute_s[lo]
        reached = int(self.compute_s.searchsorted(end_s, "right")) - 1
        return max(lo, min(reached, int(self.blocked[lo])))

    def nearest(self, hi: int, limit_s: float) -> int:
        """Return the first cut from which the stage can reach `hi` if only computation counts;
        `hi` if there is none."""
        begin_s = self.compute_s[hi] - (limit_s - self.overhead_s)
        return min(hi, int(self.compute_s.searchsorted(begin_s, "left")))


@dataclass(frozen=True)
class _Band:
    """The cuts `low`, `low + 1`, ...; `reached` says which of these cuts the stages so far can
    reach."""

    low: int
    reached: Array

    @property
    def cuts(self) -> Array:
        return self.low + np.flatnonzero(self.reached)


def fixed_order(
    stages: Sequence[Stage], objective: Objective
) -> tuple[float, tuple[int, ...]] | None:
    """Return the partition whose slowest stage is fastest: the seconds of this stage, and the cuts.

    None if there is no partition. Each stage has a layer or more. Raises `PlanError` without
    stages, or for stages with different numbers of layers.
    """
    lengths = sorted({len(stage.compute_s) - 1 for stage in stages})
    if len(lengths) != 1:
        raise PlanError(
            f"stages of {lengths} layers: give one or more, all with the same number of layers"
        )
    if len(stages) > lengths[0]:
        return None
    search = _Search(stages, objective)
    low_s = search.computed_s()
    if math.isinf(low_s):
        return None
    trial_s = min(low_s * (1 + 100 * COARSE) or 1e-12, search.most_s)
    while (best := search.below(trial_s)) is None:
        if trial_s >= search.most_s:
            return None
        low_s = trial_s
        trial_s = min(search.most_s, search.least_s + GALLOP * (trial_s - search.least_s))
    return bisect_limit(best, low_s, search.below, search.slowest_s, 2 * search.rounding_s)


class _Search:
    """Finds the cuts that stages can reach, for one limit after another."""

    def __init__(self, stages: Sequence[Stage], objective: Objective) -> None:
        self.stages, self.objective = stages, objective
        self.layers = len(stages[0].compute_s) - 1
        self.rounding_s = ROUNDING * max(
            float(stage.compute_s[-1] + stage.overhead_s) for stage in stages
        )
        self.least_s = 0.0
        self.most_s = 2 * max(
            float(
                stage.compute_s[-1] + stage.overhead_s + stage.arrive_s.max() + stage.leave_s.max()
            )
            for stage in stages
        )

    def slowest_s(self, cuts: Sequence[int]) -> float:
        """Return the seconds of the slowest stage between these cuts."""
        spans = zip(self.stages, (0, *cuts), (*cuts, self.layers), strict=True)
        return max(stage.seconds(lo, hi, self.objective) for stage, lo, hi in spans)

    def computed_s(self) -> float:
        """Return a limit just below the lowest limit that a partition meets if only computation
        counts; infinite if no partition can compute all layers."""
        low_s, high_s = 0.0, self.most_s
        if self._farthest(high_s)[-1] < self.layers:
            return math.inf
        while high_s - low_s > COARSE * high_s and high_s > 1e-15:
            middle_s = (low_s + high_s) / 2
            if self._farthest(middle_s)[-1] < self.layers:
                low_s = middle_s
            else:
                high_s = middle_s
        self.least_s = low_s
        return low_s

    def below(self, limit_s: float) -> tuple[int, ...] | None:
        """Return cuts whose stages all take `limit_s` at most; None if there are none."""
        lasts, firsts = self._farthest(limit_s), self._nearest(limit_s)
        bands = [_Band(0, np.ones(1, bool))]
        for number, stage in enumerate(self.stages, 1):
            low, high = max(number, firsts[number]), lasts[number]
            if high < low:
                return None
            bands.append(_Band(low, self._reached(stage, bands[-1], low, high, limit_s)))
            if not bands[-1].reached.any():
                return None
        last = bands[-1]
        if not last.reached[-1] or last.low + len(last.reached) - 1 != self.layers:
            return None
        return self._walked(bands, limit_s)

    def _farthest(self, limit_s: float) -> list[int]:
        """Return, by number of stages, the last cut that these first stages can reach if only
        computation counts."""
        lasts = [0]
        for number, stage in enumerate(self.stages, 1):
            most = self.layers - (len(self.stages) - number)  # later stages have a layer each
            lasts.append(min(stage.farthest(lasts[-1], limit_s), most))
        return lasts

    def _nearest(self, limit_s: float) -> list[int]:
        """Return, by number of stages, the first cut from which the remaining stages can reach the
        end if only computation counts."""
        firsts = [self.layers]
        for number in range(len(self.stages) - 1, -1, -1):
            firsts.insert(0, max(self.stages[number].nearest(firsts[0], limit_s), number))
        return firsts

    def _reached(self, stage: Stage, before: _Band, low: int, high: int, limit_s: float) -> Array:
        """Return which of the cuts `low` to `high` a stage can reach from the band `before`."""
        begin, end = before.low, before.low + len(before.reached)
        room_s = limit_s - stage.overhead_s + stage.compute_s[begin:end]
        if self.objective == "sum":
            room_s -= stage.arrive_s[begin:end]
        else:
            room_s[stage.arrive_s[begin:end] > limit_s] = -np.inf
        room_s[~before.reached] = -np.inf
        most_s = np.maximum.accumulate(room_s)
        ends = np.arange(low, high + 1)
        last = np.minimum(ends - 1 - begin, len(most_s) - 1)  # index of the last cut before an end
        allowed_s = np.where(last >= 0, most_s[last], -np.inf)
        needed_s = stage.compute_s[low : high + 1]
        if self.objective == "sum":
            timely = needed_s + stage.leave_s[low : high + 1] <= allowed_s
        else:
            timely = (needed_s <= allowed_s) & (stage.leave_s[low : high + 1] <= limit_s)
        if stage.unbounded:
            return np.asarray(timely)
        # If several first cuts leave the most time, the last one gives the stage the fewest bytes.
        places = np.maximum.accumulate(np.where(room_s == most_s, np.arange(len(room_s)), 0))
        fits = timely & self._fits(stage, begin + places[last], ends, limit_s)
        others = np.flatnonzero(timely & ~fits)
        if len(others):
            fits[others] = self._reached_by_pairs(stage, before, ends[others], limit_s)
        return np.asarray(fits)

    def _reached_by_pairs(self, stage: Stage, before: _Band, ends: Array, limit_s: float) -> Array:
        """Return which of the cuts `ends` a stage can reach from the band `before`, by trying all
        pairs of cuts that are as near to each other as time and memory require."""
        first = stage.compute_s.searchsorted(stage.compute_s[ends] - (limit_s - stage.overhead_s))
        roomy = stage.nbytes.searchsorted(stage.nbytes[ends] - stage.capacity)
        longest = int((ends - np.maximum(first, roomy)).max())
        lo = ends[None, :] - 1 - np.arange(max(longest + 1, 1))[:, None]
        place = lo - before.low
        inside = (place >= 0) & (place < len(before.reached))
        reached = inside & before.reached[np.where(inside, place, 0)]
        lo = np.maximum(lo, 0)
        return np.any(reached & self._fits(stage, lo, ends[None, :], limit_s), axis=0)

    def _fits(self, stage: Stage, lo: Array, hi: Array, limit_s: float) -> Array:
        """Return which layers lo..hi a stage can run within the limits of time and memory."""
        compute_s = stage.overhead_s + stage.compute_s[hi] - stage.compute_s[lo]
        if self.objective == "sum":
            timely = compute_s + stage.arrive_s[lo] + stage.leave_s[hi] <= limit_s
        else:
            transfers_s = np.maximum(stage.arrive_s[lo], stage.leave_s[hi])
            timely = np.maximum(compute_s, transfers_s) <= limit_s
        need = stage.nbytes[hi] - stage.nbytes[lo] + stage.buffers[lo] + stage.buffers[hi]
        return timely & (lo < hi) & (need <= stage.capacity) & (stage.blocked[lo] >= hi)

    def _walked(self, bands: Sequence[_Band], limit_s: float) -> tuple[int, ...]:
        """Return the cuts of a partition, found from the end back to the beginning."""
        cuts = [self.layers]
        for number in range(len(self.stages) - 1, -1, -1):
            begins = bands[number].cuts
            begins = begins[begins < cuts[0]]
            limit = limit_s * (1 + 1e-13) + self.rounding_s
            fits = self._fits(self.stages[number], begins, cuts[0], limit)
            assert fits.any(), "a cut that was reached has a way to it"
            cuts.insert(0, int(begins[np.flatnonzero(fits)[-1]]))
        return tuple(cuts[1:-1])
