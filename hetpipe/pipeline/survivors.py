"""Starts workers on the remaining devices after a loss, and plans again for them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hetpipe.crew.crew import Crew
from hetpipe.crew.launcher import missing_members
from hetpipe.crew.workers import share_operators
from hetpipe.errors import BackendError, HetpipeError, PlanError, WorkerError
from hetpipe.pipeline.earlier import GAIN
from hetpipe.pipeline.fit import check_fit
from hetpipe.pipeline.options import PlanOptions
from hetpipe.pipeline.planning import Planning
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.auto import plan as plan_on
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Tables
from hetpipe.words import words

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.pipeline.setup import Setup


START_S = 60.0
"""Seconds in which a device opens."""


class MissingError(WorkerError):
    """A crew did not start, because the devices of `members` are not found."""

    def __init__(self, why: str, members: list[str]) -> None:
        super().__init__(why)
        self.members = members


def start_crew(cluster: Cluster) -> Crew:
    """Start a crew. Raises `MissingError` if the devices of some members are not found."""
    try:
        return Crew.start(cluster, start_timeout_s=START_S, wait=False)
    except BackendError as error:
        if missing := missing_members(cluster):
            raise MissingError(str(error), missing) from error
        raise


def checked_plan(setup: Setup, before: Plan, present: Plan, tables: Tables) -> Plan:
    """Return the plan for a new crew as `plan_for` does. Raises `PlanError` if it does not fit."""
    captured, crew, infos = setup.captured, setup.crew, setup.crew.infos
    share_operators(captured, crew)
    try:
        plan = plan_for(captured, crew.cluster, before, present, tables)
        boards = [board.id for board in crew.cluster.described]
        sync = captured.sync_batch_norm
        check_fit(plan, infos, setup.optimizer, setup.updates, sync, boards)
    except HetpipeError as error:
        raise PlanError(
            f"the devices that are left ({words(crew.cluster.ids)}) cannot train the model: {error}"
        ) from error
    return plan


def plan_for(
    captured: Captured, cluster: Cluster, before: Plan, present: Plan, tables: Tables
) -> Plan:
    """Return the fastest plan on a cluster that trains as the plan `before` did.

    It has the same mini-batch, micro-batches and weight policy. It has the same schedule or, if no
    such plan fits, another one that flushes as well. The `present` plan stays, with unused members
    in the places of lost ones, unless another plan is clearly faster. Nothing is measured. Raises
    `PlanError`.
    """
    spared = _with_spares(cluster, present, tables)
    whole = before.rule.replicates or not before.rule.averages
    try:
        plan = (_replicated if whole else _searched)(captured, cluster, before, tables)
    except PlanError:
        if before.rule.flushes:
            plan = _searched(captured, cluster, before, tables, ())
        elif spared is not None:
            plan = spared
        else:
            raise
    if spared is not None and spared.step_s < (1 + GAIN) * plan.step_s:
        plan = spared  # most programs are compiled already
    return replace(plan, splits=before.splits, notes=before.notes)


def priced_again(plan: Plan, tables: Tables) -> Plan:
    """Return a plan with its price by other costs. Raises `PlanError`."""
    return Priced(tables, PlannerOptions(plan.mini_batch, weights=plan.weights)).plan_again(plan)


def _replicated(captured: Captured, cluster: Cluster, before: Plan, tables: Tables) -> Plan:
    """Return the plan that gives every member the whole model."""
    planning = Planning(
        captured.name, captured.layer_names, cluster, before.mini_batch,
        lambda sizes: {size: tables[size] for size in sizes if size in tables},
    )  # fmt: skip
    options = PlanOptions(
        microbatches=before.microbatches, schedule=before.schedule, weights=before.weights
    )
    return planning.choose(options)[0]


def _searched(
    captured: Captured,
    cluster: Cluster,
    before: Plan,
    tables: Tables,
    schedules: tuple[str, ...] | None = None,
) -> Plan:
    """Return the fastest plan with one of these `schedules`, by default the plan's; () is all."""
    # Batch norms see how replicas divide a micro-batch, so replicas would change the training.
    replicas = before.rule.flushes and not captured.updated_buffers
    options = PlannerOptions(
        before.mini_batch, (before.microbatches,),
        (before.schedule,) if schedules is None else schedules, before.weights,
        replicas=replicas or max(before.replicas) > 1,
    )  # fmt: skip
    return plan_on(tables, cluster, options)


def _with_spares(cluster: Cluster, before: Plan, tables: Tables) -> Plan | None:
    """Return the plan `before` with unused members of a cluster in the places of lost members.

    None if there are too few, or if they cannot run the layers.
    """
    lost = [member for member in dict.fromkeys(before.all_devices) if member not in cluster.ids]
    free = [member for member in cluster.ids if member not in before.all_devices]
    if len(free) < len(lost):
        return None
    names = dict(zip(lost, free, strict=False))
    stages = [
        replace(stage, devices=tuple(names.get(device, device) for device in stage.devices))
        for stage in before.stages
    ]
    try:
        return priced_again(replace(before, stages=tuple(stages)), tables)
    except PlanError:
        return None
