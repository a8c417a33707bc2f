"""The exact partition in a free order, for devices of a few types.

If transfers do not depend on the order, only the number of devices of each type matters: the
farthest cut that a devices of one type and b of another reach, within a limit, follows from the
cuts of one device fewer. A cut whose transfer exceeds the limit is skipped. The limit is bisected
until no partition is below the best one; devices may be left out. (Algorithm of section 7 in
Benoit, Rehn-Sonigo, Robert 2007 for few types; the general problem is NP-complete.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetpipe.errors import PlanError
from hetpipe.plan.costs import Array

STRICTLY = 1 - 1e-12
ROUNDING = 2.0**-49
"""More than all rounding errors of a stage's time, relative to the prefix sums."""

NEAR = 2e-3
"""Relative width of the bracket below which every other limit is just below the best partition."""


@dataclass(frozen=True, eq=False)
class DeviceType:
    """`count` equal devices. `layers_s` are the seconds of each layer, infinite if they cannot run
    it; a stage takes `overhead_s` more, and its layers' `nbytes` need `capacity`.

    Raises `PlanError` for numbers below 0 and for no devices.
    """

    name: str
    count: int
    layers_s: Array
    overhead_s: float = 0.0
    nbytes: Array | None = None
    capacity: float = np.inf

    def __post_init__(self) -> None:
        values = [np.array([self.count, self.overhead_s]), self.layers_s]
        if self.nbytes is not None:
            values.append(self.nbytes)
        for name, each in zip(("count or overhead_s", "layers_s", "nbytes"), values, strict=False):
            if not (each >= 0).all():
                raise PlanError(f"{self.name} has {name} {each.min()}: give 0 or more")


@dataclass(frozen=True)
class TypedStage:
    """Layers `lo` to `hi` (excluded) on a device whose type has the index `kind`."""

    kind: int
    lo: int
    hi: int


def free_order(
    types: Sequence[DeviceType], transfers_s: Array | None = None
) -> tuple[float, tuple[TypedStage, ...]] | None:
    """Return the lowest slowest stage over all orders of devices; None if none can run all layers.

    `transfers_s[c]` is the time of the transfer at cut c, 0 to L, beside the computation. The
    search takes time in proportion to the product of the counts. Raises `PlanError` for no devices,
    unequal lengths, and transfers that are negative or infinite.
    """
    search = _Search(types, transfers_s)
    high_s, best = search.most_s, search.within(search.most_s)
    if best is None:
        return None
    high_s, low_s, snapped = search.slowest_s(best), search.least_s(), False
    while low_s < search.just_below(high_s):
        snapped = not snapped and high_s - low_s <= NEAR * high_s
        trial_s = (low_s + high_s) / 2
        if snapped:
            trial_s = search.just_below(high_s)
        elif 0 < low_s < high_s / 2:
            trial_s = math.sqrt(low_s * high_s)
        stages = search.within(trial_s)
        slowest_s = np.inf if stages is None else search.slowest_s(stages)
        if stages is None or slowest_s >= high_s:  # beyond the limit by rounding: none below
            low_s = trial_s
        else:
            high_s, best = slowest_s, stages
    return high_s, best


class _Search:
    """Finds the farthest cuts by counts of devices, for one limit after another."""

    def __init__(self, types: Sequence[DeviceType], transfers_s: Array | None) -> None:
        if not any(kind.count for kind in types):
            raise PlanError(f"{len(types)} types with 0 devices: give one device or more")
        self.types = types
        self.layers = len(types[0].layers_s)
        self.transfers_s = np.zeros(self.layers + 1) if transfers_s is None else transfers_s
        for kind in types:
            if len(kind.layers_s) != self.layers or len(self.transfers_s) != self.layers + 1:
                raise PlanError(
                    f"{kind.name} has {len(kind.layers_s)} layers and {len(self.transfers_s)} cuts "
                    f"have a transfer: give {self.layers} layers, and {self.layers + 1} cuts"
                )
            if kind.nbytes is not None and len(kind.nbytes) != self.layers:
                raise PlanError(
                    f"{kind.name} has {len(kind.nbytes)} nbytes and {self.layers} layers: give "
                    "each layer its bytes"
                )
        if not (self.transfers_s.min() >= 0 and self.transfers_s.max() < np.inf):
            raise PlanError(
                f"transfers take {self.transfers_s.min()} to {self.transfers_s.max()} s: give "
                "finite times of 0 or more"
            )
        able = [np.isfinite(kind.layers_s) for kind in types]
        self.seconds = [
            _sums(np.where(runs, kind.layers_s, 0.0))
            for kind, runs in zip(types, able, strict=True)
        ]
        self.unable = [_sums(~runs) for runs in able]
        self.nbytes = [
            _sums(np.zeros(self.layers) if kind.nbytes is None else kind.nbytes) for kind in types
        ]
        self.most_s = float(self.transfers_s.max()) + max(
            kind.overhead_s + float(sums[-1])
            for kind, sums in zip(types, self.seconds, strict=True)
        )
        self.levels = _levels([kind.count for kind in types])

    def just_below(self, limit_s: float) -> float:
        """Return the highest limit that no stage of `limit_s` meets by a rounding error."""
        return limit_s * STRICTLY - ROUNDING * self.most_s

    def least_s(self) -> float:
        """Return a bound below any slowest stage: the layers' least times over all devices."""
        quickest_s = np.min([kind.layers_s for kind in self.types if kind.count], axis=0)
        return float(quickest_s.sum() / sum(kind.count for kind in self.types)) * STRICTLY

    def slowest_s(self, stages: Sequence[TypedStage]) -> float:
        """Return the slowest stage or transfer of a partition."""
        return max(
            max(
                self.types[stage.kind].overhead_s
                + float(self.seconds[stage.kind][stage.hi] - self.seconds[stage.kind][stage.lo]),
                float(self.transfers_s[stage.hi]) if stage.hi < self.layers else 0.0,
            )
            for stage in stages
        )

    def within(self, limit_s: float) -> tuple[TypedStage, ...] | None:
        """Return a partition whose stages and transfers meet `limit_s`; None if there is none."""
        reach = [self._reach(n, limit_s) for n in range(len(self.types))]
        farthest = [np.array([0, self.layers + 1])]  # by level; the last entry stands for no state
        for parents in self.levels:
            most = np.full(len(parents[0]) + 1, self.layers + 1)
            most[:-1] = reach[0][farthest[-1][parents[0]]]
            for n, states in enumerate(parents[1:], 1):
                np.maximum(most[:-1], reach[n][farthest[-1][states]], out=most[:-1])
            farthest.append(most)
        if farthest[-1][0] < self.layers:
            return None
        state, stages = 0, []
        for level in range(len(self.levels), 0, -1):
            hi = int(farthest[level][state])
            for n, parents in enumerate(self.levels[level - 1]):
                lo = int(farthest[level - 1][parents[state]])
                if reach[n][lo] == hi and lo <= self.layers:
                    break
            if lo < hi:
                stages.append(TypedStage(n, lo, hi))
            state = int(self.levels[level - 1][n][state])
        return tuple(reversed(stages))

    def _reach(self, kind: int, limit_s: float) -> Array:
        """Return, by cut, the farthest cut that one more device of a type reaches, or the cut."""
        own, seconds = self.types[kind], self.seconds[kind]
        cuts = np.arange(self.layers + 1)
        # A sum of differences may exceed by a rounding error the limit that they came from.
        room_s = (limit_s - own.overhead_s) * (1 + 1e-14)
        last = seconds.searchsorted(seconds + room_s, "right") - 1
        able = self.unable[kind].searchsorted(self.unable[kind], "right") - 1
        roomy = self.nbytes[kind].searchsorted(self.nbytes[kind] + own.capacity, "right") - 1
        allowed = (self.transfers_s <= limit_s) | (cuts == self.layers)
        nearest = np.maximum.accumulate(np.where(allowed, cuts, 0))  # the last such cut
        ends = np.minimum(np.minimum(last, able), roomy)
        ends = nearest[np.maximum(ends, 0)]  # the overhead alone may be above the limit
        return np.append(np.maximum(cuts, ends), 0)  # no state reaches nothing


def _levels(counts: Sequence[int]) -> list[list[Array]]:
    """Return the states by level. States are counts of devices by type, level n has n devices.

    Each state of a level has, for each type, the place in the level before of the state with one
    device of that type fewer; -1, the entry after the last, if there is none.
    """
    states = np.indices([count + 1 for count in counts]).reshape(len(counts), -1)
    totals = states.sum(axis=0)
    place = np.empty(len(totals), np.int64)
    order = np.argsort(totals, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(totals))[:-1])
    for group in groups:
        place[group] = np.arange(len(group))
    strides = [int(np.prod([count + 1 for count in counts[n + 1 :]])) for n in range(len(counts))]
    return [
        [np.where(states[n][group] > 0, place[group - strides[n]], -1) for n in range(len(counts))]
        for group in groups[1:]
    ]


def _sums(values: Array) -> Array:
    return np.concatenate(([0.0], np.cumsum(values)))
