"""Setup: the parts of a pipeline that are checked before anything is loaded."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hetpipe.buckets import Buckets
from hetpipe.cluster.hosts import notes_of
from hetpipe.cluster.parts import without
from hetpipe.crew.workers import share_operators
from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import NO_OPTIMIZER
from hetpipe.pipeline.fit import (
    check_boards,
    check_costs,
    check_count,
    check_cuts,
    check_dtypes,
    check_fit,
    check_loss,
    fixed_by,
    with_gpipe,
)
from hetpipe.pipeline.lossscale import LossScale
from hetpipe.pipeline.planning import microbatches_of, planning_for
from hetpipe.pipeline.resume import Progress as SavedProgress
from hetpipe.pipeline.resume import progress_of
from hetpipe.plan.limits import why_unable
from hetpipe.plan.sharing import measured_media
from hetpipe.words import choices, format_nbytes, words

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.whole_loss import WholeLossCaptured
    from hetpipe.checkpoint.checkpoint import Checkpoint
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.table import CostTable
    from hetpipe.crew.crew import Crew
    from hetpipe.optim.rule import Optimizer
    from hetpipe.pipeline.options import (
        PassOptions,
        PlanOptions,
        SurvivalOptions,
        UpdateOptions,
    )
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.measure import Progress
    from hetpipe.profile.rounds import Effort

log = logging.getLogger("hetpipe")


@dataclass(frozen=True)
class Setup:
    """The parts of a pipeline that change only after the loss of a device, and its first plan."""

    captured: Captured
    crew: Crew
    plan: Plan
    optimizer: Optimizer
    passes: PassOptions
    updates: UpdateOptions
    survival: SurvivalOptions
    tables: Mapping[int, CostTable]
    """All costs that the planner has seen, by the samples of a micro-batch."""

    @property
    def whole_loss(self) -> WholeLossCaptured | None:
        """The captured model, if all outputs of a mini-batch together have one loss."""
        from hetpipe.capture.whole_loss import WholeLossCaptured

        return self.captured if isinstance(self.captured, WholeLossCaptured) else None

    @property
    def sums_losses(self) -> bool:
        """Whether losses are sums, whose gradients the update divides by the loss's count."""
        return self.captured.has_count or self.passes.whole_loss

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the numbers of a training, as JSON values, without the learning
        rate and the plan. A resume must have its checkpoint's, except those in `changed`.

        The number of micro-batches is a setting only if the model has batch norms, because it
        changes their statistics.
        """
        captured, optimizer, updates = self.captured, self.optimizer, self.updates
        rule, padding = updates.loss_scale, captured.padding
        settings: dict[str, Any] = {
            "seed": self.passes.seed,
            "precision": captured.precision.compute,
            "cut_dtype": captured.precision.cut,
            "sync_batch_norm": captured.sync_batch_norm,
            "loss_over": self.passes.loss_over,
            "buckets": None if padding is None else padding.settings,
            "clip_norm": updates.clip_norm,
            "clip_each": updates.clip_each,
            "accumulate": updates.accumulate,
            "loss_scale": asdict(rule) if isinstance(rule, LossScale) else rule,
            "ema": updates.ema,
            **{f"optimizer.{name}": value for name, value in optimizer.settings.items()},
            "optimizer.groups": optimizer.members(captured.parameters),
        }
        if captured.updated_buffers:
            settings["microbatches"] = self.plan.microbatches
        return dict(json.loads(json.dumps(settings)))


def resolve(
    asked: PlanOptions,
    passes: PassOptions,
    cluster: Cluster,
    mini_batch: int,
    resume: Checkpoint | None,
    replans: bool,
) -> tuple[PlanOptions, str]:
    """Return the plan's options, and why the plan's layers may not move (empty if they may).

    If the options name no part of a plan, they get the checkpoint's plan; with `replans` only its
    micro-batches, if the cluster lacks a device of the plan or has a member that the training did
    not have. Raises `HetpipeError` for options that contradict each other.
    """
    fixed = fixed_by(asked, cluster.described)
    if resume is not None and asked.plan is None and not asked.asked:
        saved = progress_of(resume)
        if replans and (change := _change_of(saved, cluster)):
            log.warning("%s: the training continues with a new plan", change)
            asked = replace(asked, microbatches=saved.plan.microbatches)
        else:
            asked = replace(asked, plan=saved.plan)
    check_costs(asked)
    if passes.whole_loss:
        asked = with_gpipe(asked)
    if asked.microbatches is not None:
        check_count(asked.microbatches, mini_batch)
    return asked, fixed


def _change_of(saved: SavedProgress, cluster: Cluster) -> str:
    """Return why the plan of a checkpoint does not suit a cluster; empty if it does."""
    if lost := [member for member in saved.plan.all_devices if member not in cluster.ids]:
        return f"the checkpoint's plan needs {words(lost)}, which the cluster lacks"
    new = [member for member in cluster.ids if saved.members and member not in saved.members]
    return f"the checkpoint was saved without {words(new)}" if new else ""


def set_up(
    captured: Captured,
    crew: Crew,
    optimizer: Optimizer,
    options: tuple[PlanOptions, PassOptions, UpdateOptions, SurvivalOptions],
    mini_batch: int,
    progress: Progress,
    report: Callable[[Effort], None],
) -> tuple[Setup, CostTable | None]:
    """Plan a pipeline, and check that model, plan, devices and options fit together.

    Also returns the plan's costs, if they are known. `report` gets the effort of a profile. Raises
    `HetpipeError`.
    """
    asked, passes, updates, survival = options
    if captured.trains and optimizer is NO_OPTIMIZER:
        raise HetpipeError("captured is for a training: leave it out, or give an optimizer")
    asked = _check_captured(captured, asked, passes)
    share_operators(captured, crew)
    check_cuts(asked.cuts or (), captured.layer_names)
    microbatches, infos = microbatches_of(asked), crew.infos
    if microbatches > 1 and captured.trains:
        check_loss(captured, -(-mini_batch // microbatches))
    members = infos if asked.plan is None else asked.plan.all_devices
    check_dtypes(captured.precision, [infos[member] for member in members if member in infos])
    planning = planning_for(captured, crew, optimizer, mini_batch, progress, report)
    if survival.survives:
        _check_recompute(passes)
        asked = replace(asked, priced=True)
        used = () if asked.plan is None else asked.plan.all_devices
        layered = without_spares(planning.cluster, survival.spares, used)
        planning = replace(planning, cluster=layered)
    plan, costs = planning.choose(asked)
    tables = planning.seen
    if asked.costs is not None:
        tables[asked.costs.samples] = asked.costs
    if survival.survives:
        planning.measure_for_losses(plan, shares=asked.costs is None)
        check_costs_of_all(crew.cluster, tables)
        check_spares(plan, survival.spares, next(iter(tables.values())))
    notes = [] if captured.padding is None else [captured.padding.text]
    if costs is not None and costs.whole_loss:
        notes.append(str(costs.whole_loss[plan.stages[-1].devices[0]]))
    if costs is not None and (media := measured_media(plan, costs)):
        notes.append(f"measured: messages share network cards of hosts: {', '.join(media)}")
    if survival.survives and (nbytes := snapshots_nbytes(next(iter(tables.values())))):
        notes.append(f"two snapshots take {format_nbytes(nbytes)} of the memory of this process")
    if crew.cluster.connections is not None:
        notes += notes_of(crew.cluster.connections)
    plan = replace(plan, notes=tuple(dict.fromkeys((*plan.notes, *notes))))
    divided = microbatches == 1 and plan.rule.flushes and max(plan.replicas) > 1
    if divided and captured.trains:
        check_loss(captured, -(-mini_batch // 2), replicas=True)
    boards = [board.id for board in crew.cluster.described]
    check_fit(plan, infos, optimizer, updates, captured.sync_batch_norm, boards)
    check_boards(plan, crew.cluster, infos)
    return Setup(captured, crew, plan, optimizer, passes, updates, survival, tables), costs


def _check_recompute(passes: PassOptions) -> None:
    """Raise `HetpipeError` for modes of single stages, which a plan after a loss may not have."""
    modes = passes.recompute
    if not isinstance(modes, str) and modes:
        raise HetpipeError(
            f"recompute={list(modes)} has a mode for each stage, and after a loss survive='auto' "
            f"may continue with other stages: give one mode, such as recompute={modes[0]!r}"
        )


def snapshots_nbytes(table: CostTable) -> int:
    """Return the predicted bytes of two snapshots: parameters and optimizer state."""
    return 2 * sum(layer.params_nbytes + layer.state_nbytes for layer in table.layers)


def check_spares(plan: Plan, spares: Sequence[str], table: CostTable) -> None:
    """Raise `HetpipeError` for a spare that can run no stage of the plan."""
    for spare in spares:
        whys = [why_unable(table, spare, stage.lo, stage.hi) for stage in plan.stages]
        if all(whys):
            raise HetpipeError(
                f"spares: {spare} could take the place of no member, since it can run no stage: "
                f"{whys[0]}; choose another spare"
            )


def check_costs_of_all(cluster: Cluster, tables: Mapping[int, CostTable]) -> None:
    """Raise `HetpipeError` if a member has no costs, so that no plan could use it after a loss."""
    for table in tables.values():
        if missing := [member for member in cluster.ids if member not in table.devices]:
            raise HetpipeError(
                f"survive='auto' needs the costs of all members, and the given costs lack "
                f"{words(missing)}: leave costs out, or these members"
            )


def without_spares(cluster: Cluster, spares: Sequence[str], used: Collection[str] = ()) -> Cluster:
    """Return a cluster without its spares, except the `used` ones: the plan of a checkpoint may
    have them in the places of lost members.

    Raises `HetpipeError` for unknown spares, if no member is left to train, and if the cluster has
    only one member, whose loss could not be survived.
    """
    if len(cluster.members) == 1:
        raise HetpipeError(
            f"survive='auto': {cluster.ids[0]} is the only device, and nothing could continue "
            "without it: add devices, or leave survive out"
        )
    for spare in spares:
        if spare not in cluster.ids:
            raise HetpipeError(f"spares: no member {spare!r}; {choices(spare, cluster.ids)}")
    if set(spares) == set(cluster.ids):
        raise HetpipeError(
            f"spares: {words(spares)} are all members, and none is left to train: name fewer spares"
        )
    return without(cluster, set(spares).difference(used))


def _check_captured(captured: Captured, planned: PlanOptions, passes: PassOptions) -> PlanOptions:
    """Return the plan's options, with the splits of the captured model.

    Raises `HetpipeError` if the model was captured with other splits or pass options.
    """
    if passes.dtypes not in (type(passes.dtypes)(), captured.precision):
        raise HetpipeError(
            f"captured has {captured.precision}, not {passes.dtypes}: capture the model with these "
            "dtypes"
        )
    padding = captured.padding
    if passes.buckets is not None and (
        padding is None or Buckets.of(passes.buckets) != padding.buckets
    ):
        raise HetpipeError(
            f"captured has {'no buckets' if padding is None else padding.buckets}, not "
            f"{Buckets.of(passes.buckets)}: give capture() these buckets"
        )
    if passes.sync_batch_norm and not captured.sync_batch_norm:
        raise HetpipeError(
            "captured has sync_batch_norm=False: capture the model with sync_batch_norm=True"
        )
    if passes.whole_loss is not captured.keeps_output:
        raise HetpipeError(
            f"captured is for another loss_over than {passes.loss_over!r}: leave captured out"
        )
    if planned.plan is None and planned.split is None:
        return replace(planned, split=captured.split or None)
    if planned.channels != captured.split:
        raise HetpipeError(
            f"captured has split={captured.split}, not {planned.channels}: capture the model with "
            "this split"
        )
    return planned
