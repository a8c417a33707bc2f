"""Starts workers on the remaining devices after a loss, and plans again for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, permutations
from typing import TYPE_CHECKING

from hetpipe.buckets import like
from hetpipe.crew.crew import Crew
from hetpipe.crew.launcher import missing_members
from hetpipe.crew.workers import share_operators
from hetpipe.errors import BackendError, HetpipeError, PlanError, WorkerError
from hetpipe.pipeline.absent import OPEN_S
from hetpipe.pipeline.earlier import GAIN
from hetpipe.pipeline.fit import check_fit
from hetpipe.pipeline.options import PlanOptions
from hetpipe.pipeline.planning import Planning
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.auto import plan as plan_on
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, nearest_table
from hetpipe.wire.shares import divide
from hetpipe.words import words

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.table import CostTable
    from hetpipe.pipeline.setup import Setup


MOST_CHOICES = 120
"""The most ways to put unused members in the places of lost ones that are compared."""
TRIES = 3
"""A training ends at this number of errors in workers at the same mini-batch."""


class MissingError(WorkerError):
    """The crew of a cluster did not start, because the devices of `members` are not found."""

    def __init__(self, why: str, cluster: Cluster, members: list[str]) -> None:
        super().__init__(why)
        self.cluster, self.members = cluster, members


class ErrorCount:
    """Counts the errors that workers have raised at the same mini-batch."""

    def __init__(self) -> None:
        self._count, self._number = 0, -1

    def add(self, error: WorkerError, number: int) -> None:
        """Count an error at the mini-batch of this number. Raises `WorkerError` at the last one."""
        self._count = self._count + 1 if number == self._number else 1
        self._number = number
        if self._count == TRIES:
            raise WorkerError(
                f"{error}; this was error {TRIES} at the same mini-batch, so no device is to "
                "blame: correct the model or the mini-batch, and continue from a checkpoint"
            ) from error


def start_crew(cluster: Cluster) -> Crew:
    """Start a crew. Raises `MissingError` if the devices of some members are not found.

    If all devices are found when they are sought again, the start is tried again, once.
    """
    try:
        return Crew.start(cluster, start_timeout_s=OPEN_S, wait=False)
    except (BackendError, WorkerError) as error:
        if missing := missing_members(cluster):
            raise MissingError(str(error), cluster, missing) from error
        return Crew.start(cluster, start_timeout_s=OPEN_S, wait=False)


def checked_plan(
    setup: Setup, before: Plan, present: Plan, sizes: Collection[int]
) -> tuple[Plan, CostTable]:
    """Return the plan for a new crew as `plan_for` does. Raises `PlanError` if it does not fit."""
    captured, crew, infos = setup.captured, setup.crew, setup.crew.infos
    share_operators(captured, crew)
    try:
        plan, costs = plan_for(captured, crew.cluster, before, present, setup.tables, sizes)
        boards = [board.id for board in crew.cluster.described]
        sync = captured.sync_batch_norm
        check_fit(plan, infos, setup.optimizer, setup.updates, sync, boards)
    except HetpipeError as error:
        raise PlanError(
            f"the devices that are left ({words(crew.cluster.ids)}) cannot train the model: {error}"
        ) from error
    return plan, costs


def plan_for(
    captured: Captured,
    cluster: Cluster,
    before: Plan,
    present: Plan,
    tables: Mapping[int, CostTable],
    sizes: Collection[int],
) -> tuple[Plan, CostTable]:
    """Return the fastest plan on a cluster that trains as the plan `before` did, and its costs.

    It has the same mini-batch, micro-batches and weight policy, and replicas only if `before` has
    some. All replicas can train micro-batches of these `sizes`. It has the same schedule or, if no
    such plan fits, another one that flushes as well. The `present` plan stays, with unused members
    in the places of lost ones, unless another plan is clearly faster. Nothing is measured. Raises
    `PlanError`.
    """
    spared = _with_spares(cluster, present, tables)
    try:
        plan = _Search(captured, cluster, before, tables, sizes).fastest()
    except PlanError:
        if spared is None:
            raise
        plan = spared
    if spared is not None and spared.step_s < (1 + GAIN) * plan.step_s:
        plan = spared  # most programs are compiled already
    table = _table_of(tables, plan)
    general = [note for note in before.notes if not any(id in note for id in table.devices)]
    notes = tuple(dict.fromkeys((*plan.notes, *general)))
    return replace(plan, splits=before.splits, notes=notes), table


@dataclass(frozen=True)
class _Search:
    """The search for the fastest plan that trains as the plan `before` did."""

    captured: Captured
    cluster: Cluster
    before: Plan
    tables: Mapping[int, CostTable]
    sizes: Collection[int]
    """The samples of the micro-batches that every replica can train."""

    def fastest(self) -> Plan:
        """Return the fastest plan with the schedule of the plan `before` or, if there is none, with
        another one that flushes as well. Raises `PlanError`."""
        rule = self.before.rule
        try:
            if rule.replicates or not rule.averages:
                return self._replicated()
            return self._searched((self.before.schedule,))
        except PlanError:
            if not rule.flushes:
                raise
            return self._searched(())

    def _replicated(self) -> Plan:
        """Return the plan that gives every member the whole model. Raises `PlanError`."""
        captured, before = self.captured, self.before
        planning = Planning(
            captured.name, captured.layer_names, self.cluster, before.mini_batch,
            lambda _: dict(self.tables),
        )  # fmt: skip
        plan, _ = planning.choose(
            PlanOptions(
                microbatches=before.microbatches, schedule=before.schedule, weights=before.weights
            )
        )
        if not self._can_train(plan):
            raise PlanError(
                f"replicas on {words(self.cluster.ids)} cannot divide small mini-batches"
            )
        return plan

    def _searched(self, schedules: tuple[str, ...]) -> Plan:
        """Return the fastest plan with one of these `schedules`; () is all."""
        before = self.before
        # Replicas could not divide small mini-batches that a training without them may still get.
        options = PlannerOptions(
            before.mini_batch, (before.microbatches,), schedules, before.weights,
            replicas=max(before.replicas) > 1, recompute=before.recompute,
        )  # fmt: skip
        plan = plan_on(self.tables, self.cluster, options)
        if not self._can_train(plan):
            plan = plan_on(self.tables, self.cluster, replace(options, replicas=False))
        return plan

    def _can_train(self, plan: Plan) -> bool:
        """Return whether every replica gets as many rows as the model needs: one or, with batch
        norm, two. A pipeline that only predicts has no `sizes`."""
        if not self.sizes or max(plan.replicas) == 1 or not plan.rule.flushes:
            return True
        try:
            rows = (
                like(rows, size)
                for stage in plan.stages
                for size in self.sizes
                for rows in divide(int(size), stage.shares)
            )
            self.captured.layer_graph(min(rows, key=int))
        except HetpipeError:
            return False
        return True


def priced_again(plan: Plan, tables: Mapping[int, CostTable]) -> Plan:
    """Return a plan with its price by other costs. Raises `PlanError`."""
    return Priced(tables, PlannerOptions(plan.mini_batch, weights=plan.weights)).plan_again(plan)


def _table_of(tables: Mapping[int, CostTable], plan: Plan) -> CostTable:
    """Return the costs at the plan's size of micro-batches; the nearest known ones with replicas,
    which divide them."""
    if max(plan.replicas) > 1:
        return nearest_table(tables, plan)
    return Priced(tables, PlannerOptions(plan.mini_batch)).table(plan.share_samples)


def _with_spares(cluster: Cluster, before: Plan, tables: Mapping[int, CostTable]) -> Plan | None:
    """Return the plan `before` with unused members of a cluster in the places of lost members: the
    fastest of a number of choices.

    None if there are too few, or if they cannot run the layers.
    """
    lost = [member for member in dict.fromkeys(before.all_devices) if member not in cluster.ids]
    free = [member for member in cluster.ids if member not in before.all_devices]
    found = []
    for chosen in islice(permutations(free, len(lost)), MOST_CHOICES):
        names = dict(zip(lost, chosen, strict=True))
        stages = [
            replace(stage, devices=tuple(names.get(device, device) for device in stage.devices))
            for stage in before.stages
        ]
        with suppress(PlanError):
            found.append(priced_again(replace(before, stages=tuple(stages)), tables))
    return min(found, key=lambda plan: plan.step_s, default=None)
