"""The interval in which a step is expected: it should hold four of five measured steps.

A spread is half the distance between the quartiles, relative to the median. A stage's spread is

    sqrt(D^2 + sum_l (t_l max(0, s_l^2 - D^2)^(1/2))^2 / (sum_l t_l)^2 + M^2 + C^2)

where D is the spread of the device (of the whole model's time on the device, and of the probes
that corrected its costs), t_l and s_l are the time and spread of the stage's layer l, M is the
spread of the simulator, and C the spread by contention. D is common to all layers of a device and
does not average out over the layers, but the rest of a layer's spread does. A stage with replicas
has the largest spread of its devices. Other work on a machine disturbs all devices of the machine
together. So the two ends of the interval are simulations in which all passes are faster, or all
slower, by their spread times `WIDTH`.

If other work used the share c of the cores while costs were measured, this work may end, or double.
So C alone moves each end by the factor 1 / (1 - c).
"""

from __future__ import annotations

import math
from dataclasses import replace

from hetpipe.cost.table import CostTable
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.plan.pricing import predicted_step_s, stage_times

WIDTH = 1.2816 / 0.6745  # width of the central 80 % of a normal distribution, over the central 50 %
MOST_CONTENTION = 0.9  # a larger share of the cores counts as this share
SIMULATOR = 0.02  # spread of measured steps around steps that are simulated with exact costs


def with_interval(plan: Plan, table: CostTable) -> Plan:
    """Return the plan with its interval, from the spreads of `table`, by which the plan was
    made."""
    return replace(plan, interval_s=interval_s(plan, table, as_planned=True))


def interval_s(
    plan: Plan, table: CostTable, *, as_planned: bool = False
) -> tuple[float, float] | None:
    """Return the ends of the interval of a step; None if the plan's devices have no spreads.

    Passes are priced by the table, or by the plan if `as_planned`.
    """
    if all(table.devices[device].spread == 0.0 for device in plan.all_devices):
        return None
    factors = [1 + WIDTH * stage_spread(stage, table) for stage in plan.stages]
    times = stage_times(plan, table, as_planned)

    def step_s(scales: list[float]) -> float:
        def scaled(times_s: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(s * time_s for s, time_s in zip(scales, times_s, strict=False))

        disturbed = replace(
            times,
            forward_s=scaled(times.forward_s),
            backward_s=scaled(times.backward_s),
            update_s=scaled(times.update_s),
        )
        return predicted_step_s(plan, table, disturbed)

    return step_s([1 / factor for factor in factors]), step_s(factors)


def stage_spread(stage: StagePlan, table: CostTable) -> float:
    """Return the relative spread of a stage's passes, by the formula of this module."""
    return max(_spread(table, device, stage.lo, stage.hi) for device in stage.devices)


def _spread(table: CostTable, device: str, lo: int, hi: int) -> float:
    cost = table.devices[device]
    layers = cost.layers[lo:hi]
    times_s = [layer.forward_s + layer.backward_s for layer in layers]
    own = [math.sqrt(max(0.0, layer.spread**2 - cost.spread**2)) for layer in layers]
    varying_s = math.hypot(*(t * s for t, s in zip(times_s, own, strict=True)))
    share = varying_s / sum(times_s) if varying_s else 0.0
    return math.hypot(cost.spread, share, SIMULATOR, contention_spread(table.contention))


def contention_spread(share: float) -> float:
    """Return the relative spread of passes beside other work that uses this share of the cores."""
    share = min(share, MOST_CONTENTION)
    return share / (1 - share) / WIDTH
