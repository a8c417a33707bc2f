"""Learning: costs that follow the machine, from the passes of recent mini-batches."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean

from hetpipe.cost.table import CostTable, DeviceCost
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.schedule.action import Op
from hetpipe.simulate.timeline import Timeline

WINDOW = 8
"""The number of mini-batches from which costs are learned."""
LEAST = 3
"""The fewest of them whose times make sense, to learn from."""
FARTHEST = 1e3
"""A device this many times slower or quicker than its profile: a wrong clock."""
_PARTS = {
    Op.FORWARD: "F",
    Op.BACKWARD: "B",
    Op.BACKWARD_INPUT: "B",
    Op.BACKWARD_WEIGHT: "B",
    Op.UPDATE: "U",
}


class Learning:
    """The measured over the predicted time of each device's passes, by one table of costs."""

    def __init__(self, table: CostTable, plan: Plan) -> None:
        self._table, self._plan = table, plan
        self._factors: dict[str, float] = {}
        self.recent: deque[Timeline] = deque(maxlen=WINDOW)

    def saw(self, timeline: Timeline) -> None:
        """A mini-batch of the plan's size was trained."""
        self.recent.append(timeline)

    def planned(self, plan: Plan) -> None:
        """There is a new plan: earlier passes were those of other stages."""
        self._factors = self.factors
        self._plan = plan
        self.recent.clear()

    @property
    def factors(self) -> dict[str, float]:
        """By device. Devices of which no time makes sense keep theirs, or have none."""
        ratios: dict[str, list[float]] = defaultdict(list)
        for timeline in self.recent:
            for device, ratio in ratios_of(timeline, self._plan, self._table).items():
                ratios[device].append(ratio)
        learned = {device: typical(each) for device, each in ratios.items() if len(each) >= LEAST}
        return {**self._factors, **learned}

    @property
    def step_s(self) -> float | None:
        """Measured seconds of a mini-batch; None before enough have come."""
        if self._plan.rule.flushes:
            steps_s = [timeline.step_s for timeline in self.recent]
        else:  # a flush in between starts a clock anew
            ends_s = [max(s.end_s for s in each.spans) for each in self.recent if each.spans]
            steps_s = [after_s - before_s for before_s, after_s in pairwise(ends_s)]
        steps_s = [step_s for step_s in steps_s if 0 < step_s < math.inf]
        return typical(steps_s) if len(steps_s) >= LEAST else None

    def table(self, emulated: Collection[str] = ()) -> CostTable:
        """The costs as they are learned; times of `emulated` devices are labelled so."""
        return scaled(self._table, self.factors, emulated)


def ratios_of(timeline: Timeline, plan: Plan, table: CostTable) -> dict[str, float]:
    """Measured over predicted seconds of each device's passes of one mini-batch.

    A device is left out if it lacks some of its passes, or if one of its times makes no sense: NaN,
    zero or less, or so long or short that no device can be meant.
    """
    sums_s: dict[tuple[int, str], float] = defaultdict(float)
    counts: Counter[tuple[int, str]] = Counter()
    senseless: set[int] = set()
    for span in timeline.spans:
        stage, op = span.action.stage, span.action.op
        if (part := _PARTS.get(op)) is None:
            continue
        time_s = span.end_s - span.start_s
        if not 0 < time_s < math.inf:
            senseless.add(stage)
        sums_s[stage, part] += time_s
        counts[stage, part] += op is not Op.BACKWARD_WEIGHT
    ratios = {}
    for number, stage_plan in enumerate(plan.stages):
        device = stage_plan.devices[0]
        present = {part for part in "FBU" if counts[number, part]}
        if number in senseless or device not in table.devices or not present >= {*"FB"}:
            continue
        measured_s = predicted_s = 0.0
        for part, (times, each_s) in _predicted(plan, stage_plan, table).items():
            if part in present:
                measured_s += times * sums_s[number, part] / counts[number, part]
                predicted_s += times * each_s
        ratio = measured_s / predicted_s if predicted_s > 0 else math.nan
        if 1 / FARTHEST < ratio < FARTHEST:
            ratios[device] = ratio
    return ratios


def _predicted(plan: Plan, stage: StagePlan, table: CostTable) -> dict[str, tuple[int, float]]:
    """How often a stage does a pass in a mini-batch, and its seconds, by part."""
    span = (stage.devices[0], stage.lo, stage.hi)
    return {
        "F": (plan.microbatches, table.forward_s(*span)),
        "B": (plan.microbatches, table.backward_s(*span)),
        "U": (1, table.update_s(*span)),
    }


def typical(values: Sequence[float]) -> float:
    """The mean of the middle half: a few slow steps, or wrong clocks, do not move it."""
    ordered = sorted(values)
    aside = len(ordered) // 4
    return fmean(ordered[aside : len(ordered) - aside])


def scaled(
    table: CostTable, factors: Mapping[str, float], emulated: Collection[str] = ()
) -> CostTable:
    """The table with every device's times multiplied by its factor; 1 without one."""

    def device_of(name: str, cost: DeviceCost) -> DeviceCost:
        factor = factors.get(name, 1.0)
        layers = tuple(
            replace(
                layer,
                forward_s=layer.forward_s * factor,
                backward_s=layer.backward_s * factor,
                update_s=layer.update_s * factor,
            )
            for layer in cost.layers
        )
        label = "emulated" if name in emulated else cost.label
        return replace(cost, layers=layers, overhead_s=cost.overhead_s * factor, label=label)

    if not factors:
        return table
    devices = {name: device_of(name, cost) for name, cost in table.devices.items()}
    return replace(table, devices=devices)
