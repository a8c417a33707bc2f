"""Learning: derives costs from the passes of recent mini-batches, and decides when layers move."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from hetpipe.cost.table import CostTable, DeviceCost
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.profile.clock import spread_of
from hetpipe.schedule.action import Op
from hetpipe.simulate.timeline import Span, Timeline

if TYPE_CHECKING:
    from hetpipe.profile.drift import Correction

WINDOW = 8
"""The number of latest mini-batches from which costs are learned."""
LEAST = 3
"""The least number of mini-batches with valid times from which costs are learned."""
FARTHEST = 1e3
"""A device that seems this many times slower or faster than its profile has a wrong clock."""
# Looked up only once, because a look-up in an enum for every pass takes too long.
FORWARD, BACKWARD_WEIGHT, UPDATE = Op.FORWARD, Op.BACKWARD_WEIGHT, Op.UPDATE
COMPUTES = frozenset(op for op in Op if op.is_compute)


class Learning:
    """Learns, per device, the ratio of measured to predicted time of its passes."""

    def __init__(self, table: CostTable, plan: Plan) -> None:
        self._table, self.plan = _costs_in_use(table, plan), plan
        self._factors: dict[str, float] = {}  # learned under earlier plans
        self._learned: dict[str, float] | None = {}  # None: not computed yet
        self.recent: deque[Timeline] = deque(maxlen=WINDOW)

    def add(self, timeline: Timeline) -> None:
        """Add the timeline of a trained mini-batch of the plan's size."""
        self.recent.append(timeline)
        self._learned = None

    def restart(self, plan: Plan, table: CostTable | None = None) -> None:
        """Begin again with a new plan, perhaps with another table of the same devices' costs,
        because earlier passes belong to other stages."""
        self._factors = self.factors
        self.plan, self._table = plan, _costs_in_use(table or self._table, plan)
        self.recent.clear()

    @property
    def factors(self) -> dict[str, float]:
        """Ratios by device. Without valid times, a device keeps its earlier ratio, if any."""
        if self._learned is None:
            ratios = ratios_of(self.recent, self.plan, self._table)
            able = {device: each for device, each in ratios.items() if len(each) >= LEAST}
            new = {device: typical(each) for device, each in able.items()}
            self._learned = {**self._factors, **new}
        return self._learned

    def corrected(self) -> Correction | None:
        """Return the plan's prediction, corrected by its last passes.

        Each device's spread includes the spread of its passes. Contention is zero, because measured
        times include contention already. None until every device has enough passes, and for a plan
        with replicas, whose passes cannot be told apart.
        """
        plan = self.plan
        ratios = ratios_of(self.recent, plan, self._table)
        too_few = any(len(ratios.get(device, ())) < LEAST for device in plan.all_devices)
        if too_few or max(plan.replicas) > 1:
            return None
        table = scale_costs(self._table, self.factors)
        costs = {
            id: replace(cost, spread=math.hypot(cost.spread, spread_of(ratios[id])))
            if id in ratios
            else cost
            for id, cost in table.devices.items()
        }
        present = replace(table, devices=costs, contention=0.0)
        from hetpipe.profile.drift import corrected_by  # it loads torch

        return corrected_by(plan, self.factors, present)

    @property
    def step_s(self) -> float | None:
        """Measured seconds of a mini-batch; None before enough mini-batches were measured."""
        if self.plan.rule.flushes:
            steps_s = [timeline.step_s for timeline in self.recent]
        else:  # after `Training.flush` times begin at 0 again; the negative difference is dropped
            ends_s = [max(s.end_s for s in each.spans) for each in self.recent if each.spans]
            steps_s = [after_s - before_s for before_s, after_s in pairwise(ends_s)]
        steps_s = [step_s for step_s in steps_s if 0 < step_s < math.inf]
        return typical(steps_s) if len(steps_s) >= LEAST else None

    def table(self, emulated: Collection[str] = ()) -> CostTable:
        """Return the learned costs; the times of `emulated` devices have the label `emulated`."""
        return scale_costs(self._table, self.factors, emulated)


class Hysteresis:
    """Counts windows of mini-batches. Layers move if a plan saves enough in two windows in a row.

    The window after a move shows whether the move kept its promise. Then a pause of one window
    follows or, after a broken promise, a pause twice as long as the last one.
    """

    def __init__(self) -> None:
        self.pause = 1  # length in windows
        self._left = 0
        self._streak = 0

    def waits(self) -> bool:
        """Whether the window that has ended belongs to a pause. Call it once per window."""
        self._left = max(self._left - 1, -1)
        return self._left >= 0

    def pause_after(self, kept: bool) -> None:
        """Begin the pause after a move's window; `kept` says whether the promise was kept."""
        self.pause = 1 if kept else 2 * self.pause
        self._left, self._streak = self.pause, 0

    def moves(self, promises: bool) -> bool:
        """Whether to move after a window; `promises` says whether its best plan saves enough."""
        self._streak = self._streak + 1 if promises else 0
        return self._streak > 1


def ratios_of(
    timelines: Iterable[Timeline], plan: Plan, table: CostTable
) -> dict[str, list[float]]:
    """Return, by device, the measured seconds of its passes divided by the predicted seconds, one
    ratio for each mini-batch.

    A mini-batch gives a device no ratio if forwards or backwards of its stage are missing, or if
    their time is NaN, not above 0, or impossibly long or short. Replicas have no ratios, since the
    passes on their rows cannot be told apart.
    """
    predicted = [_predicted(stage, table, plan.recompute) for stage in plan.stages]
    ratios: dict[str, list[float]] = defaultdict(list)
    for timeline in timelines:
        sums_s, counts = sums_of(timeline)
        for number, stage in enumerate(plan.stages):
            parts = [part for part in "FBU" if counts[number, part]]
            if parts[:2] != ["F", "B"] or len(stage.devices) > 1:
                continue
            times = {"F": plan.microbatches, "B": plan.microbatches, "U": 1}
            measured_s = sum(
                times[part] * sums_s[number, part] / counts[number, part] for part in parts
            )
            expected_s = sum(times[part] * predicted[number][part] for part in parts)
            ratio = measured_s / expected_s if expected_s > 0 else math.nan
            if 1 / FARTHEST < ratio < FARTHEST:
                ratios[stage.devices[0]].append(ratio)
    return ratios


def sums_of(timeline: Timeline) -> tuple[dict[tuple[int, str], float], Counter[tuple[int, str]]]:
    """Return the total seconds and the counts of forwards (F), backwards (B) and updates (U), by
    stage and letter.

    A backward in two halves counts once. While passes on two lanes of a worker overlap, each has
    half of the time. An invalid time makes the sum NaN.
    """
    sums_s: dict[tuple[int, str], float] = defaultdict(float)
    counts: Counter[tuple[int, str]] = Counter()
    spans = [span for span in timeline.spans if span.action.op in COMPUTES]
    for span, time_s in zip(spans, _times_s(spans, timeline.workers), strict=True):
        op = span.action.op
        key = span.action.stage, "F" if op is FORWARD else "U" if op is UPDATE else "B"
        sums_s[key] += time_s if time_s > 0 else math.nan
        counts[key] += op is not BACKWARD_WEIGHT
    return sums_s, counts


def _times_s(spans: Sequence[Span], rows: Sequence[str]) -> list[float]:
    """Return the seconds of spans; the lanes of a worker share the seconds in which they overlap.

    `rows` has the names of the timeline's rows.
    """
    times_s = [span.end_s - span.start_s for span in spans]
    lanes: dict[str, list[int]] = defaultdict(list)
    for n, span in enumerate(spans):
        worker, lane, _ = rows[span.worker].partition(" lane ")
        if lane:
            lanes[worker].append(n)
    for group in lanes.values():
        moments_s = sorted({s for n in group for s in (spans[n].start_s, spans[n].end_s)})
        if not all(map(math.isfinite, moments_s)):
            continue
        for n in group:
            times_s[n] = 0.0
        for begin_s, end_s in pairwise(moments_s):
            busy = [n for n in group if spans[n].start_s <= begin_s and end_s <= spans[n].end_s]
            for n in busy:
                times_s[n] += (end_s - begin_s) / len(busy)
    return times_s


def _predicted(stage: StagePlan, table: CostTable, recompute: bool) -> dict[str, float]:
    """Return seconds of a stage's forward, backward and update; 0 for a device without costs."""
    if stage.devices[0] not in table.devices:
        return dict.fromkeys("FBU", 0.0)
    return dict(
        zip("FBU", table.passes_s(stage.devices[0], stage.lo, stage.hi, recompute), strict=True)
    )


def _costs_in_use(table: CostTable, plan: Plan) -> CostTable:
    """Return the costs while only the plan's devices compute, as in the measured passes."""
    return table.beside(len({*plan.all_devices}))


def typical(values: Sequence[float]) -> float:
    """Return the mean of the middle half of the values, which a few slow steps do not change."""
    ordered = sorted(values)
    aside = len(ordered) // 4
    return fmean(ordered[aside : len(ordered) - aside])


def scale_costs(
    table: CostTable, factors: Mapping[str, float], emulated: Collection[str] = ()
) -> CostTable:
    """Return the table with every device's times multiplied by the device's factor, by default 1.

    If there are factors, `emulated` devices get the label `emulated`.
    """

    def device_of(name: str, cost: DeviceCost) -> DeviceCost:
        factor = factors.get(name, 1.0)
        layers = tuple(layer.scaled(factor) for layer in cost.layers)
        label = "emulated" if name in emulated else cost.label
        return replace(cost, layers=layers, overhead_s=cost.overhead_s * factor, label=label)

    if not factors:
        return table
    devices = {name: device_of(name, cost) for name, cost in table.devices.items()}
    return replace(table, devices=devices)
