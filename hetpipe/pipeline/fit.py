"""Whether a plan, its devices and what a user asks fit together; said before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError
from hetpipe.schedule.generators import averages, generate, is_asynchronous
from hetpipe.schedule.lanes import laned_stages, row_workers
from hetpipe.worker.weights import POLICIES

if TYPE_CHECKING:
    from hetpipe.capture.precision import Precision
    from hetpipe.optim.rule import Optimizer
    from hetpipe.plan.plan import Plan
    from hetpipe.schedule.action import Schedule
    from hetpipe.sdk.info import DeviceInfo
    from hetpipe.wire.messages import Clip


def check_wishes(plan: Plan | None, wishes: Mapping[str, object]) -> bool:
    """Whether anything is wished for (not None or "auto") that a plan decides.

    Raises `HetpipeError` if a plan is given as well.
    """
    asked = [name for name, value in wishes.items() if value not in (None, "auto")]
    if asked and plan is not None:
        raise HetpipeError(
            f"plan and {', '.join(asked)} are both given, and a plan says all of them: leave out "
            "one or the other"
        )
    return bool(asked)


def check_fit(
    plan: Plan,
    infos: Mapping[str, DeviceInfo],
    optimizer: Optimizer,
    clip: Clip | None,
    accumulate: int,
    sync_batch_norm: bool,
) -> None:
    """Raises `HetpipeError` for what does not go with a plan. `infos` by its devices' names."""
    check_policy(plan, optimizer)
    check_lanes(plan, infos)
    if sync_batch_norm:
        check_sync_batch_norm(plan)
    check_clip(plan, clip)
    check_accumulate(plan, accumulate)


def check_policy(plan: Plan, optimizer: Optimizer) -> None:
    """Raises `HetpipeError` where policy, schedule, depth and optimizer do not fit together."""
    policy, schedule = plan.weights, plan.schedule
    in_flight, microbatches = plan.in_flight, plan.microbatches
    if policy not in POLICIES:
        raise HetpipeError(f"no weight policy {policy!r}; known: {', '.join(POLICIES)}")
    if is_asynchronous(schedule) == (policy == "flush"):
        kind = "asynchronous" if policy == "flush" else "synchronous"
        wanted = POLICIES[1:] if policy == "flush" else POLICIES[:1]
        raise HetpipeError(
            f"schedule {schedule} is {kind} and weights={policy!r} does not fit it: choose "
            f"{' or '.join(repr(name) for name in wanted)}, or another schedule"
        )
    if not averages(schedule) and policy != "stash":
        raise HetpipeError(
            f"under {schedule} a replica updates nothing between a forward and its backward, so "
            f"weights={policy!r} has nothing to choose from: use 'stash', the default"
        )
    stages = len(in_flight)
    if policy == "2bw" and microbatches < in_flight[0]:
        raise HetpipeError(
            f"2bw accumulates at least as many micro-batches as are in flight: {microbatches} in a "
            f"mini-batch, {in_flight[0]} in flight; use {in_flight[0]} micro-batches or more"
        )
    if policy == "spectrain":
        straight = [stages - stage for stage in range(stages)]
        if optimizer.name != "sgd" or not optimizer.state:
            raise HetpipeError(
                f"spectrain predicts with the momentum of sgd alone, not of {optimizer.name}; use "
                "hp.optim.sgd(momentum=0.9), or weights='pipeoptim'"
            )
        if list(in_flight) != straight or microbatches != 1:
            raise HetpipeError(
                f"spectrain is defined for {straight} mini-batches of one micro-batch in flight, "
                f"not for {list(in_flight)} micro-batches of {microbatches} each"
            )
        replicas = [len(stage.devices) for stage in plan.stages]
        if max(replicas) > 1:
            raise HetpipeError(
                f"spectrain is defined for stages on one device each, not for {replicas} replicas; "
                "use weights='pipeoptim'"
            )
    if policy == "pipeoptim" and optimizer.predict is None:
        raise HetpipeError(
            f"pipeoptim needs an optimizer that predicts weights, and {optimizer.name} as it is "
            "set does not (sgd needs momentum); or use weights='stash'"
        )


def check_lanes(plan: Plan, infos: Mapping[str, DeviceInfo]) -> None:
    """Raises `HetpipeError` where the schedule asks more queues of a device than it has.

    `infos` by what the plan calls a device.
    """
    if is_asynchronous(plan.schedule):
        return
    rows = _rows(plan)
    at, laned = row_workers(rows), laned_stages(rows)
    for stage in sorted(laned):
        lanes = at.count(next(w for row, w in zip(rows, at, strict=True) if row[0].stage == stage))
        for device in plan.stages[stage].devices:
            queues = infos[device].capabilities.queues
            if queues < lanes:
                raise HetpipeError(
                    f"{plan.schedule} runs {lanes} passes of a stage at once, and {device} "
                    f"({infos[device].id}) runs {queues}: choose another schedule, such as 1f1b, "
                    f"or a device with capabilities.queues of {lanes} or more"
                )


def check_sync_batch_norm(plan: Plan) -> None:
    """Raises `HetpipeError` where replicas that share statistics do not do the same passes in the
    same order."""
    replicated = {n for n, stage in enumerate(plan.stages) if len(stage.devices) > 1}
    if not replicated:
        return
    cure = "leave sync_batch_norm out, or choose another schedule, such as 1f1b"
    if is_asynchronous(plan.schedule):
        raise HetpipeError(
            f"sync_batch_norm: under {plan.schedule} the replicas of stage {min(replicated)} take "
            f"mini-batches in turn, so no two have rows of the same one; {cure}"
        )
    if laned := laned_stages(_rows(plan)) & replicated:
        raise HetpipeError(
            f"sync_batch_norm: {plan.schedule} runs two passes of stage {min(laned)} at once, and "
            f"its replicas would meet in either order; {cure}"
        )


def _rows(plan: Plan) -> Schedule:
    """The rows of one mini-batch."""
    workers = len(set(plan.devices))
    return generate(plan.schedule, len(plan.stages), plan.microbatches, workers=workers)


def check_dtypes(precision: Precision, infos: Iterable[DeviceInfo]) -> None:
    """Raises `HetpipeError` for a device that has not the dtypes of `precision`."""
    for info in infos:
        known = ", ".join(info.dtypes)
        if precision.compute is not None and precision.compute not in info.dtypes:
            raise HetpipeError(
                f"precision={precision.compute!r}: {info.id} computes in {known}; leave the device "
                "out of the cluster, or choose another precision"
            )
        if precision.cut is not None and precision.cut not in (*info.dtypes, *info.cast_dtypes):
            casts = f", and casts {', '.join(info.cast_dtypes)}" if info.cast_dtypes else ""
            raise HetpipeError(
                f"cut_dtype={precision.cut!r}: {info.id} has {known}{casts}; leave the device out "
                "of the cluster, or cut_dtype out"
            )


def check_clip(plan: Plan, clip: Clip | None) -> None:
    """Raises `HetpipeError` for a bound that cannot be, or norms that nobody has."""
    if clip is None:
        return
    if not 0 < clip.norm < math.inf:
        raise HetpipeError(f"clip_norm={clip.norm}: give a finite number above 0")
    if is_asynchronous(plan.schedule) and not clip.each:
        raise HetpipeError(
            f"under {plan.schedule} no two stages update at the same time, so there is no "
            "norm over all of them: clip each stage's with clip_each=True, or use a "
            "synchronous schedule"
        )


def check_accumulate(plan: Plan, accumulate: int) -> None:
    """Raises `HetpipeError` for a number of mini-batches that the schedule cannot gather."""
    if accumulate < 1:
        raise HetpipeError(f"accumulate={accumulate}: give 1 or more mini-batches")
    if accumulate > 1 and is_asynchronous(plan.schedule):
        raise HetpipeError(
            f"accumulate={accumulate}: {plan.schedule} updates behind each "
            "mini-batch; use more micro-batches in one, or a synchronous schedule"
        )
