"""Text: a plan as a plain text table."""

from __future__ import annotations

from hetpipe.plan.plan import Plan, StagePlan

HEADER = ("stage", "layers", "device", "forward ms", "backward ms", "in flight", "memory MiB")
MIB = 2**20


def format_plan(plan: Plan) -> str:
    """Return the stages in rows, then schedule, prediction and origin."""
    rows = [HEADER, *(_row(plan, index, stage) for index, stage in enumerate(plan.stages))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    step = "step unknown"
    if plan.is_priced:
        step = (
            f"step {1e3 * plan.step_s:.2f} ms{_interval(plan)}, {plan.samples_per_s:.1f} samples/s"
            f"{_bound(plan)}"
        )
    lines.append(
        f"{plan.schedule}, {plan.microbatches} micro-batches of a mini-batch of {plan.mini_batch}: "
        f"{step}, fill limit {100 * plan.fill_limit:.0f} %, "
        f"{f'{plan.label} costs' if plan.is_priced else 'no costs'}, {plan.origin} plan"
    )
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


def _interval(plan: Plan) -> str:
    if plan.interval_s is None:
        return ""
    low_s, high_s = plan.interval_s
    return f" ({1e3 * low_s:.2f} .. {1e3 * high_s:.2f})"


def _bound(plan: Plan) -> str:
    if plan.lower_bound_s is None or plan.gap is None:
        return ""
    return f" (no plan below {1e3 * plan.lower_bound_s:.2f} ms: {100 * plan.gap:.0f} % above)"


def _row(plan: Plan, index: int, stage: StagePlan) -> tuple[str, ...]:
    priced = plan.is_priced
    first, last = plan.layers[stage.lo], plan.layers[stage.hi - 1]
    return (
        str(index),
        f"{stage.lo}-{stage.hi - 1} {first}" + (f" .. {last}" if last != first else ""),
        ", ".join(stage.devices),
        f"{1e3 * stage.forward_s:.2f}" if priced else "?",
        f"{1e3 * stage.backward_s:.2f}" if priced else "?",
        str(stage.in_flight),
        f"{stage.memory_nbytes / MIB:.1f} / {stage.capacity_nbytes / MIB:.0f}" if priced else "?",
    )
