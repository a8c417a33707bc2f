"""Checks of options, before anything is loaded or measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetpipe.cli.options import PipelineOptions, split_numbers
from hetpipe.errors import HetpipeError, PlanError

if TYPE_CHECKING:
    from hetpipe.pipeline.options import PlanOptions
    from hetpipe.plan.plan import Plan


def read_options(
    options: PipelineOptions,
    microbatches: int | None,
    mini_batch: int | None,
    rebalance: str | None = None,
) -> PlanOptions:
    """Return the options of a plan, after all checks that need no model. Raises `HetpipeError`."""
    from hetpipe.pipeline.fit import check_count, fixed_by
    from hetpipe.pipeline.options import PlanOptions

    asked = PlanOptions(
        cuts=split_numbers(options.cuts, "--cuts"),
        replicas=split_numbers(options.replicas, "--replicas"),
        microbatches=microbatches,
        schedule=options.schedule,
        weights=options.weights,
        rebalance=rebalance,
    )
    fixed_by(asked)
    if microbatches and mini_batch:
        check_count(microbatches, mini_batch)
    return asked


def check_plan_alone(path: Path, plan: Plan, asked: PlanOptions) -> None:
    """Raise `HetpipeError` for options that a stored plan fixes, or a plan that cannot run."""
    if asked.asked:
        options = ", ".join(f"--{name}" for name in asked.asked)
        raise HetpipeError(
            f"--plan {path} already contains {options}: leave out --plan, or these options"
        )
    plan.policy.check_rule(plan.rule)


def check_devices(asked: PlanOptions, count: int) -> None:
    """Raise `PlanError` if `count` devices are too few for the stages."""
    from hetpipe.schedule.rule import rule_of

    if asked.schedule != "auto" and rule_of(asked.schedule).several_stages:
        return
    stages = len(asked.cuts or ()) + 1
    need = sum(asked.replicas) if asked.replicas else stages
    if need > count:
        raise PlanError(
            f"{stages} stages need {need} devices, the cluster has {count}: give fewer cuts "
            "or replicas, or name more devices"
        )


def check_synchronous(schedule: str) -> None:
    """Raise `HetpipeError` for a schedule that does not flush, or is unknown."""
    from hetpipe.schedule.rule import rule_of

    if schedule != "auto" and not rule_of(schedule).flushes:
        raise HetpipeError(
            f"schedule {schedule} is asynchronous, so its training differs from the benchmark's "
            "other rows: choose a synchronous schedule, such as 1f1b"
        )


def check_picture(path: Path | None) -> None:
    """Raise `HetpipeError` if the picture cannot be drawn."""
    from hetpipe.report.picture import FORMATS

    if path is not None and path.suffix not in FORMATS:
        raise HetpipeError(f"a picture is one of {', '.join(FORMATS)}, not {path.name!r}")
