"""Checks, before anything runs, that a plan, its devices and the user's options fit together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError, PlanError
from hetpipe.schedule.generators import generate
from hetpipe.schedule.lanes import laned_stages, row_workers
from hetpipe.schedule.rule import GPIPE, rule_of

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.precision import Precision
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cluster.member import Member
    from hetpipe.optim.rule import Optimizer
    from hetpipe.pipeline.options import PlanOptions, UpdateOptions
    from hetpipe.plan.plan import Plan
    from hetpipe.schedule.action import Schedule
    from hetpipe.sdk.info import DeviceInfo
    from hetpipe.wire.messages import Clip

SHOWN_LAYERS = 200


def check_cuts(cuts: Sequence[int], layers: Sequence[str]) -> None:
    """Raise `PlanError`, with a list of the numbered layers, for a cut that is not the number of a
    layer after the first."""
    if all(0 < cut < len(layers) for cut in cuts):
        return
    if len(layers) == 1:
        raise PlanError(
            f"cuts {list(cuts)}: the model has one layer, {layers[0]}, and cannot be cut"
        )
    lines = [f"  {number:3d}  {name}" for number, name in enumerate(layers[:SHOWN_LAYERS])]
    more = len(layers) - SHOWN_LAYERS
    raise PlanError(
        f"cuts {list(cuts)}: a cut is the number of the first layer of a stage, 1 to "
        f"{len(layers) - 1} of this model, whose layers are\n"
        + "\n".join(lines)
        + (f"\n  and {more} more" if more > 0 else "")
    )


def check_costs(planned: PlanOptions) -> None:
    """Raise `HetpipeError` if costs are given without the plan that was made with them."""
    if planned.costs is not None and planned.plan is None:
        raise HetpipeError(
            "the option costs belongs to a given plan, but no plan is given: give plan as well, or "
            "leave costs out"
        )


def with_gpipe(asked: PlanOptions) -> PlanOptions:
    """Return the options for a loss over whole mini-batches, which needs all outputs before the
    first backward. Raises `PlanError` for a schedule with another order."""
    schedule = asked.schedule if asked.plan is None else asked.plan.schedule
    if schedule not in ("auto", GPIPE.name):
        given = f"schedule={schedule!r}" if asked.plan is None else f"a plan for {schedule}"
        raise PlanError(
            f"loss_over='mini-batch' needs all outputs of a mini-batch before its first backward, "
            f"as in gpipe, and {given} was given: give schedule='gpipe', or leave it out"
        )
    return asked if asked.plan is not None else replace(asked, schedule=GPIPE.name)


def fixed_by(asked: PlanOptions, boards: Sequence[Member] = ()) -> str:
    """Return why no layer of a plan with these options may move; empty if layers may move.

    `boards` are the cluster's boards. Raises `HetpipeError` if `rebalance` asks for a move then.
    """
    rule = None if asked.schedule == "auto" else rule_of(asked.schedule)
    if boards:
        why = (
            f"the time of {', '.join(board.id for board in boards)} is modelled, so no measurement "
            "shows a change of it: leave out boards"
        )
    elif asked.plan is not None:
        why = "a given plan fixes every layer: remove plan"
    elif asked.cuts:
        why = f"cuts {list(asked.cuts)} say where every layer is: leave out cuts"
    elif asked.replicas is not None or (rule is not None and rule.replicates):
        why = "layers on several replicas do not move: leave out replicas and data-parallel"
    elif rule is not None and (rule.several_stages or not rule.averages):
        why = f"under {rule.name} layers do not move: choose a schedule with one stage per worker"
    else:
        return ""
    if asked.rebalance is not None:
        raise HetpipeError(f"rebalance={asked.rebalance!r}: {why}, or rebalance")
    return why


def why_fixed(plan: Plan) -> str:
    """Return why the layers of a plan never move, or ""."""
    if max(plan.replicas) == 1:
        return ""
    return (
        "layers on several replicas do not move: leave out replicas, and name a schedule such as "
        "'1f1b'"
    )


def check_count(microbatches: int, mini_batch: int) -> None:
    """Raise `PlanError` for more micro-batches than samples."""
    if microbatches > mini_batch:
        raise PlanError(
            f"a mini-batch of {mini_batch} cannot be {microbatches} micro-batches: choose 1 to "
            f"{mini_batch}"
        )


def check_loss(
    captured: Captured, samples: int, training: bool = True, replicas: bool = False
) -> None:
    """Raise `HetpipeError` if the losses of a mini-batch's parts do not make the loss of the whole.

    A part has `samples` samples: a micro-batch or, with `replicas`, the rows of one replica.
    """
    if fault := captured.loss_fault(samples, training):
        where = "" if training else "in eval mode "
        more = " and one device per stage, as schedule='1f1b' has" if replicas else ""
        raise HetpipeError(f"{where}{fault}{more}")


def check_fit(
    plan: Plan,
    infos: Mapping[str, DeviceInfo],
    optimizer: Optimizer,
    updates: UpdateOptions,
    sync_batch_norm: bool,
    boards: Collection[str] = (),
) -> None:
    """Raise `HetpipeError` if options or devices do not fit a plan.

    `infos` has the device of each member; `boards` are the members that are boards.
    """
    check_policy(plan, optimizer)
    check_lanes(plan, infos, boards)
    if sync_batch_norm:
        check_sync_batch_norm(plan)
    check_clip(plan, updates.clip)
    check_accumulate(plan, updates.accumulate)


def boards_of(plan: Plan, cluster: Cluster) -> list[Member]:
    """Return the boards that have a stage of the plan."""
    return [member for member in cluster.described if member.id in plan.all_devices]


def check_boards(plan: Plan, cluster: Cluster, infos: Mapping[str, DeviceInfo]) -> None:
    """Raise `PlanError` if a plan with boards has times that are not modelled, or if the numerics
    of a board (`infos`, by member) have too little memory."""
    boards = boards_of(plan, cluster)
    if not boards:
        return
    names = ", ".join(board.id for board in boards)
    if plan.label != "modelled":
        raise PlanError(
            f"the plan's times are {plan.label}, but {names} are boards with modelled "
            "times: make a plan with this cluster"
        )
    needs: dict[str, int] = defaultdict(int)
    for stage in plan.stages:
        for member in stage.devices:
            needs[infos[member].memory_domain] += stage.memory_nbytes
    for board in boards:
        info = infos[board.id]
        need = needs[info.memory_domain]
        if need > info.memory_nbytes:
            raise PlanError(
                f"{info.id} is the numerics of {board.id}. The stages on it need "
                f"{need} bytes and it has {info.memory_nbytes}: {need - info.memory_nbytes} bytes "
                "are missing; choose other numerics, or a smaller mini-batch"
            )


def check_policy(plan: Plan, optimizer: Optimizer) -> None:
    """Raise `HetpipeError` if the policy does not fit the plan's schedule or the optimizer."""
    policy = plan.policy
    policy.check(plan.rule, plan.in_flight, plan.microbatches, plan.replicas)
    fits = all(rule.name in policy.optimizers and rule.state for rule in optimizer.rules)
    if policy.optimizers and not fits:
        raise HetpipeError(
            f"{policy.name} predicts with the momentum of {' or '.join(policy.optimizers)} alone, "
            f"not of {optimizer.name}; use hp.optim.sgd(momentum=0.9), or weights='pipeoptim'"
        )
    if policy.predicts and not optimizer.predicts:
        raise HetpipeError(
            f"{policy.name} needs an optimizer that predicts weights, and {optimizer.name} with "
            "these settings does not: choose one that does (sgd needs momentum), or "
            "weights='stash'"
        )


def check_lanes(plan: Plan, infos: Mapping[str, DeviceInfo], boards: Collection[str] = ()) -> None:
    """Raise `HetpipeError` if the schedule needs more queues than a device has.

    For a member that is one of `boards`, the queues of its numerics count.
    """
    if not plan.rule.flushes:
        return
    rows = _rows(plan)
    workers, laned = row_workers(rows), laned_stages(rows)
    for stage in sorted(laned):
        worker = next(w for row, w in zip(rows, workers, strict=True) if row[0].stage == stage)
        lanes = workers.count(worker)
        for member in plan.stages[stage].devices:
            queues = infos[member].capabilities.queues
            if queues < lanes and member in boards:
                raise HetpipeError(
                    f"{plan.schedule} runs {lanes} passes of a stage at once, and {member} is a "
                    f"board whose numerics, {infos[member].id}, run {queues}: choose another "
                    f"schedule, such as 1f1b, or numerics with capabilities.queues of {lanes} or "
                    "more; `hetpipe simulate` needs no numerics"
                )
            if queues < lanes:
                raise HetpipeError(
                    f"{plan.schedule} runs {lanes} passes of a stage at once, and {member} "
                    f"({infos[member].id}) runs {queues}: choose another schedule, such as 1f1b, "
                    f"or a device with capabilities.queues of {lanes} or more"
                )


def check_sync_batch_norm(plan: Plan) -> None:
    """Raise `HetpipeError` if replicas, which share statistics, would not run the same passes in
    the same order."""
    replicated = {n for n, replicas in enumerate(plan.replicas) if replicas > 1}
    if not replicated:
        return
    cure = "leave sync_batch_norm out, or choose another schedule, such as 1f1b"
    if not plan.rule.flushes:
        raise HetpipeError(
            f"sync_batch_norm: under {plan.schedule} the replicas of stage {min(replicated)} take "
            f"mini-batches in turn, so no two replicas have rows of the same mini-batch; {cure}"
        )
    if laned := laned_stages(_rows(plan)) & replicated:
        raise HetpipeError(
            f"sync_batch_norm: {plan.schedule} runs two passes of stage {min(laned)} at once, so "
            f"its replicas might sum the statistics of different passes; {cure}"
        )


def _rows(plan: Plan) -> Schedule:
    """Return the rows of the schedule of one mini-batch."""
    workers = len(set(plan.devices))
    return generate(plan.rule, len(plan.stages), plan.microbatches, workers=workers)


def check_dtypes(precision: Precision, infos: Iterable[DeviceInfo]) -> None:
    """Raise `HetpipeError` for a device that lacks a dtype of `precision`."""
    for info in infos:
        dtypes = ", ".join(info.dtypes)
        if precision.compute is not None and precision.compute not in info.dtypes:
            raise HetpipeError(
                f"precision={precision.compute!r}: {info.id} computes in {dtypes}; leave the "
                "device out of the cluster, or choose another precision"
            )
        if precision.cut is not None and precision.cut not in (*info.dtypes, *info.cast_dtypes):
            casts = f", and casts {', '.join(info.cast_dtypes)}" if info.cast_dtypes else ""
            raise HetpipeError(
                f"cut_dtype={precision.cut!r}: {info.id} has {dtypes}{casts}; leave the device out "
                "of the cluster, or leave cut_dtype out"
            )


def check_clip(plan: Plan, clip: Clip | None) -> None:
    """Raise `HetpipeError` for a norm over all stages under a schedule that does not flush."""
    if clip is not None and not plan.rule.flushes and not clip.each:
        raise HetpipeError(
            f"under {plan.schedule} no two stages update at the same time, so there is no "
            "norm over all stages: clip each stage alone with clip_each=True, or use a "
            "synchronous schedule"
        )


def check_accumulate(plan: Plan, accumulate: int) -> None:
    """Raise `HetpipeError` for accumulation under a schedule that updates after each mini-batch."""
    if accumulate > 1 and not plan.rule.flushes:
        raise HetpipeError(
            f"accumulate={accumulate}: {plan.schedule} updates after each "
            "mini-batch; use more micro-batches per mini-batch, or a synchronous schedule"
        )
