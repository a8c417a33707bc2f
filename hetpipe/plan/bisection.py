"""Bisection: the exact partition at scale, for a fixed order of devices.

With prefix sums W of a device's times, layers i..j are a stage of at most T seconds if

    W[j] + leave[j] <= T - overhead + W[i] - arrive[i]                 objective `sum`
    W[j] <= T - overhead + W[i],  arrive[i] <= T,  leave[j] <= T       objective `max`

so one running maximum gives the cuts that k devices can reach from the cuts of k - 1 devices. Only
a band of cuts matters: by computation alone, the devices before can reach each of them, and the
devices after can reach the end from it. If memory may be short within a band, the search tries all
its pairs. Each partition found lowers T to its slowest stage, until none exists below; so the
result is exact, except for rounding of prefix sums. (Pinar, Tabak, Aykanat 2008, for chains without
transfers and memory.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetpipe.errors import PlanError
from hetpipe.plan.costs import Array, Objective

STRICTLY = 1 - 1e-12
ROUNDING = 2.0**-49
"""More than all rounding errors of a stage's time, relative to the prefix sums."""

COARSE = 1e-6
"""Precision of the bound by computation alone, before transfers and memory count."""

NEAR = 2e-3
"""Relative width of the bracket below which every other limit is just below the best partition."""

GALLOP = 4
"""Factor by which the limit grows above that bound until a partition meets it."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A possible stage on the devices `first` to `end` (excluded) of the order, with any layers.

    Arrays have an entry for each cut, 0 to L. `compute_s` are prefix sums without the fixed
    `overhead_s`; `arrive_s[i]` and `leave_s[j]` are its transfers at its two cuts. `blocked[i]` is
    the first layer from i on that it cannot run. It needs `nbytes[j] - nbytes[i]` and the `buffers`
    of both cuts. Raises `PlanError` for invalid arrays.
    """

    first: int
    end: int
    compute_s: Array
    overhead_s: float
    arrive_s: Array
    leave_s: Array
    blocked: Array
    nbytes: Array
    buffers: Array
    capacity: float

    def __post_init__(self) -> None:
        whose = f"the stage on devices {self.first}..{self.end} of the order"
        if not 0 <= self.first < self.end:
            raise PlanError(f"{whose} has no device: its end is excluded; give 0 <= first < end")
        cuts = len(self.compute_s)
        for name in ("compute_s", "nbytes", "arrive_s", "leave_s", "blocked", "buffers"):
            values = getattr(self, name)
            if len(values) != cuts:
                raise PlanError(
                    f"{whose} has {len(values)} {name} and {cuts} compute_s: give one for each cut"
                )
            sums = name in ("compute_s", "nbytes")
            if not (values.min() >= 0 and values.max() < math.inf) or (
                sums and (values[1:] < values[:-1]).any()
            ):
                raise PlanError(
                    f"{whose} has {name} that are negative, falling or infinite: give sums of "
                    "finite times and bytes; `blocked` tells the layers that it cannot run"
                )

    @cached_property
    def unbounded(self) -> bool:
        """Whether it can run all layers and has memory for them."""
        need = self.nbytes[-1] + 2 * self.buffers.max()
        return bool(need <= self.capacity and self.blocked[0] == len(self.compute_s) - 1)

    def seconds(self, lo: int, hi: int, objective: Objective) -> float:
        """Return the seconds of layers lo..hi (hi excluded)."""
        compute_s = self.overhead_s + self.compute_s[hi] - self.compute_s[lo]
        if objective == "sum":
            return float(compute_s + self.arrive_s[lo] + self.leave_s[hi])
        return float(max(compute_s, self.arrive_s[lo], self.leave_s[hi]))

    def farthest(self, lo: int, limit_s: float) -> int:
        """Return the last cut that it reaches from `lo` by computation alone; `lo` if none."""
        end_s = limit_s - self.overhead_s + self.compute_s[lo]
        reached = int(self.compute_s.searchsorted(end_s, "right")) - 1
        return max(lo, min(reached, int(self.blocked[lo])))

    def nearest(self, hi: int, limit_s: float) -> int:
        """Return the first cut from which it reaches `hi` by computation alone; `hi` if none."""
        begin_s = self.compute_s[hi] - (limit_s - self.overhead_s)
        return min(hi, int(self.compute_s.searchsorted(begin_s, "left")))


@dataclass(frozen=True)
class Placement:
    """Layers `lo` to `hi` (excluded) on a stage."""

    stage: Stage
    lo: int
    hi: int


@dataclass(frozen=True)
class _Band:
    """The cuts `low`, `low + 1`, ... after some devices; `reached` says which are possible."""

    low: int
    reached: Array

    @property
    def cuts(self) -> Array:
        return self.low + np.flatnonzero(self.reached)


def fixed_order(
    stages: Sequence[Stage], objective: Objective, *, below_s: float = math.inf
) -> tuple[float, tuple[Placement, ...]] | None:
    """Return the lowest slowest stage, and its partition into some of `stages`, one after another.

    They use all devices, each once, and all layers; each has a layer or more. None if there is no
    such partition, or none with a slowest stage below `below_s`. Raises `PlanError` without stages,
    or for stages with different numbers of layers.
    """
    lengths = sorted({len(stage.compute_s) - 1 for stage in stages})
    if len(lengths) != 1:
        raise PlanError(f"stages of {lengths} layers: give one or more, for as many layers each")
    search = _Search(stages, objective)
    low_s = search.computed_s()
    high_s, best, snapped = below_s, None, False
    most_s = min(search.just_below(below_s), search.most_s)
    trial_s = min(low_s * (1 + 100 * COARSE) or 1e-12, most_s)
    while math.isfinite(low_s) and low_s < search.just_below(high_s):
        placements = search.below(trial_s)
        slowest_s = math.inf
        if placements is not None:
            slowest_s = max(p.stage.seconds(p.lo, p.hi, objective) for p in placements)
        if slowest_s >= high_s or placements is None:  # beyond the limit by rounding: none below
            low_s = trial_s
        else:
            best, high_s = placements, slowest_s
        if best is None:
            if trial_s >= most_s:
                return None
            trial_s = min(most_s, search.least_s + GALLOP * (trial_s - search.least_s))
            continue
        snapped = not snapped and high_s - low_s <= NEAR * high_s
        trial_s = search.just_below(high_s) if snapped else (low_s + high_s) / 2
    return None if best is None else (high_s, best)


class _Search:
    """Finds the cuts that devices can reach, for one limit after another."""

    def __init__(self, stages: Sequence[Stage], objective: Objective) -> None:
        self.objective = objective
        self.devices = max(stage.end for stage in stages)
        self.layers = len(stages[0].compute_s) - 1
        self.rounding_s = ROUNDING * max(
            float(stage.compute_s[-1] + stage.overhead_s) for stage in stages
        )
        self.ending: list[list[Stage]] = [[] for _ in range(self.devices + 1)]
        self.starting: list[list[Stage]] = [[] for _ in range(self.devices + 1)]
        for stage in stages:
            self.ending[stage.end].append(stage)
            self.starting[stage.first].append(stage)
        self._after = self._fewest(self.starting, range(self.devices, -1, -1), "end")
        self._before = self._fewest(self.ending, range(self.devices + 1), "first")
        self._widest = max(stage.end - stage.first for stage in stages)
        self.least_s = 0.0
        self.most_s = 2 * max(
            float(
                stage.compute_s[-1] + stage.overhead_s + stage.arrive_s.max() + stage.leave_s.max()
            )
            for stage in stages
        )

    def just_below(self, limit_s: float) -> float:
        """Return the highest limit that no stage of `limit_s` meets by a rounding error."""
        return limit_s * STRICTLY - 2 * self.rounding_s

    def computed_s(self) -> float:
        """Return a limit just below the lowest one that computation alone meets.

        Infinite if it meets none.
        """
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

    def below(self, limit_s: float) -> tuple[Placement, ...] | None:
        """Return a partition whose stages all take `limit_s` at most; None if there is none."""
        lasts, firsts = self._farthest(limit_s), self._nearest(limit_s)
        bands, alive = [_Band(0, np.ones(1, bool))], 0
        for end in range(1, self.devices + 1):
            low, high = max(self._before[end], firsts[end]), lasts[end]
            if high < low:
                bands.append(_Band(0, np.zeros(0, bool)))
                continue
            reached = np.zeros(high + 1 - low, bool)
            for stage in self.ending[end]:
                before = bands[stage.first]
                if before.reached.any():
                    reached |= self._reached(stage, before, low, high, limit_s)
            bands.append(_Band(low, reached))
            if reached.any():
                alive = end
            elif end - alive >= self._widest:
                return None
        last = bands[-1]
        if (
            not len(last.reached)
            or not last.reached[-1]
            or last.low + len(last.reached) - 1 != self.layers
        ):
            return None
        return self._walked(bands, limit_s)

    def _fewest(self, stages: Sequence[Sequence[Stage]], order: range, side: str) -> list[int]:
        """Return, by count of devices, the fewest stages possible on one side of them."""
        fewest = [self.layers + 1] * (self.devices + 1)
        fewest[order[0]] = 0
        for count in order[1:]:
            counts = [fewest[getattr(stage, side)] + 1 for stage in stages[count]]
            fewest[count] = min(counts, default=self.layers + 1)
        return fewest

    def _farthest(self, limit_s: float) -> list[int]:
        """Return, by count of devices, the last cut that they reach by computation; -1 if none."""
        lasts = [0] + [-1] * self.devices
        for end in range(1, self.devices + 1):
            for stage in self.ending[end]:
                begin = lasts[stage.first]
                if begin >= 0:
                    most = self.layers - self._after[end]  # later stages have a layer each
                    lasts[end] = max(lasts[end], min(stage.farthest(begin, limit_s), most))
        return lasts

    def _nearest(self, limit_s: float) -> list[int]:
        """Return, by count of devices, the first cut from which the others reach the end."""
        beyond = self.layers + 1
        firsts = [beyond] * self.devices + [self.layers]
        for first in range(self.devices - 1, -1, -1):
            for stage in self.starting[first]:
                end = firsts[stage.end]
                if end < beyond:
                    nearest = max(stage.nearest(end, limit_s), self._before[first])
                    firsts[first] = min(firsts[first], nearest)
        return firsts

    def _reached(self, stage: Stage, before: _Band, low: int, high: int, limit_s: float) -> Array:
        """Return which cuts `low` to `high` a stage reaches from some cut of the band before."""
        begin, end = before.low, before.low + len(before.reached)
        room_s = limit_s - stage.overhead_s + stage.compute_s[begin:end]
        if self.objective == "sum":
            room_s -= stage.arrive_s[begin:end]
        else:
            room_s[stage.arrive_s[begin:end] > limit_s] = -np.inf
        room_s[~before.reached] = -np.inf
        most_s = np.maximum.accumulate(room_s)
        ends = np.arange(low, high + 1)
        last = np.minimum(ends - 1 - begin, len(most_s) - 1)  # the last begin before each end
        allowed_s = np.where(last >= 0, most_s[last], -np.inf)
        needed_s = stage.compute_s[low : high + 1]
        if self.objective == "sum":
            timely = needed_s + stage.leave_s[low : high + 1] <= allowed_s
        else:
            timely = (needed_s <= allowed_s) & (stage.leave_s[low : high + 1] <= limit_s)
        if stage.unbounded:
            return np.asarray(timely)
        # Among begins with the most room, the last one leaves the stage that needs least memory.
        places = np.maximum.accumulate(np.where(room_s == most_s, np.arange(len(room_s)), 0))
        fits = timely & self._fits(stage, begin + places[last], ends, limit_s)
        others = np.flatnonzero(timely & ~fits)
        if len(others):
            fits[others] = self._reached_by_pairs(stage, before, ends[others], limit_s)
        return np.asarray(fits)

    def _reached_by_pairs(self, stage: Stage, before: _Band, ends: Array, limit_s: float) -> Array:
        """Return the same by trying all pairs of cuts within the distance that the limits allow."""
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
        """Return which runs of layers lo..hi are a stage within the limits of time and memory."""
        compute_s = stage.overhead_s + stage.compute_s[hi] - stage.compute_s[lo]
        if self.objective == "sum":
            timely = compute_s + stage.arrive_s[lo] + stage.leave_s[hi] <= limit_s
        else:
            transfers_s = np.maximum(stage.arrive_s[lo], stage.leave_s[hi])
            timely = np.maximum(compute_s, transfers_s) <= limit_s
        need = stage.nbytes[hi] - stage.nbytes[lo] + stage.buffers[lo] + stage.buffers[hi]
        return timely & (lo < hi) & (need <= stage.capacity) & (stage.blocked[lo] >= hi)

    def _walked(self, bands: Sequence[_Band], limit_s: float) -> tuple[Placement, ...]:
        """Return one of the partitions that reach the end, walking back to the beginning."""
        placements: list[Placement] = []
        end, hi = self.devices, self.layers
        while end:
            for stage in self.ending[end]:
                begins = bands[stage.first].cuts
                begins = begins[begins < hi]
                if not len(begins):
                    continue
                fits = self._fits(stage, begins, hi, limit_s * (1 + 1e-13) + self.rounding_s)
                if fits.any():
                    lo = int(begins[np.flatnonzero(fits)[-1]])
                    placements.append(Placement(stage, lo, hi))
                    end, hi = stage.first, lo
                    break
            else:
                raise AssertionError("a cut that was reached has a way to it")
        return tuple(reversed(placements))
