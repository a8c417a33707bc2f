"""Straight schedules: whole backwards and, except for `data_parallel`, one stage per worker.

Most of them start stage n of N with K_n of M forwards, then one backward, one forward, ...; they
differ in K_n. With FBP (BaPipe, section 3.2.1) forwards and backwards run together, on two lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.codes import CODES
from hetpipe.schedule.columns import Columns, Turns, columns_of, in_turns


def naive(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """Model parallelism: only one stage works at a time (here 3 stages, 2 micro-batches).

        0  F0  .  .  .  . B0 F1  .  .  .  . B1
        1   . F0  .  . B0  .  . F1  .  . B1  .
        2   .  . F0 B0  .  .  .  . F1 B1  .  .

    K_n = 1.
    """
    return one_f_one_b(stages, microbatches, [1] * stages)


def gpipe(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """All forwards, then all backwards (GPipe; here 3 stages, 3 micro-batches).

        0  F0 F1 F2  .  .  .  . B0 B1 B2
        1   . F0 F1 F2  .  . B0 B1 B2
        2   .  . F0 F1 F2 B0 B1 B2

    Every stage keeps all micro-batches in flight. Backwards run in ascending order, as in the other
    schedules, so that gradients are summed in the same order and agree bit for bit. Raises
    `ScheduleError` if `in_flight` allows fewer.
    """
    if in_flight is not None and min(in_flight) < microbatches:
        raise ScheduleError(
            f"gpipe keeps all {microbatches} micro-batches in flight, but {min(in_flight)} is the "
            f"limit; use 1f1b or {min(in_flight)} micro-batches"
        )
    return one_f_one_b(stages, microbatches, [microbatches] * stages)


def gpipe_with_loss(
    stages: int, microbatches: int, in_flight: Sequence[int] | None = None
) -> Schedule:
    """GPipe, with a wait of the last stage for the loss over all outputs (2 stages, 2
    micro-batches).

        0  F0 F1  .  .  .  . B0 B1
        1   . F0 F1  L  L B0 B1
    """
    passes = columns_of(gpipe(stages, microbatches, in_flight))
    place = len(passes.codes) - microbatches  # the last row ends with its backwards
    table = np.insert(passes.table, place, [CODES[Op.LOSS], stages - 1, 0], axis=1)
    return Columns(table, passes.lengths + (np.arange(stages) == stages - 1))


def one_f_one_b(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """Stage n starts with K_n forwards, then one backward, one forward, ...

        0  F0 F1 F2  .  .  .  . B0  - F3 B1  -  . B2  -  . B3  -
        1   . F0 F1  .  . B0  - F2 B1  - F3 B2  -  . B3  -  .  .
        2   .  . F0 B0  - F1 B1  - F2 B2  - F3 B3  -  .  .  .  .

    K_n = min(N-n, M) (DAPPLE, section 3, policy P_A; PipeDream's 1F1B with a flush), or min(k, M)
    with the stage's entry k of `in_flight`. DAPPLE's policy P_B, K_n = min(2(N-n)-1, M), hides
    transfers and keeps about twice as many micro-batches in flight.
    """
    depth = in_flight or [stages - stage for stage in range(stages)]
    rows, numbers = np.arange(stages)[:, None], np.arange(microbatches)
    deep = np.minimum(depth, microbatches)[:, None]
    return in_turns(
        (
            Turns(Op.BACKWARD, 0 * rows, rows, numbers),
            Turns(Op.FORWARD, -deep, rows, numbers),
        ),
        microbatches,
    )


def one_f_one_b_sno(
    stages: int, microbatches: int, in_flight: Sequence[int] | None = None
) -> Schedule:
    """BaPipe's 1F1B-SNO (figure 6a; 2 stages, 3 micro-batches): transfers are not overlapped.

        0  F0 F1  . B0 F2 B1  . B2
        1   . F0 B0 F1 B1 F2 B2  .

    K_n = min(N-n, M), or fewer if `in_flight` requires. Figure 5a's 1F1B-AS has the same order, on
    asynchronous devices; only `StageTimes.chunks` differs.
    """
    return one_f_one_b(stages, microbatches, depths(stages, 1, in_flight))


def one_f_one_b_so(
    stages: int, microbatches: int, in_flight: Sequence[int] | None = None
) -> Schedule:
    """BaPipe's 1F1B-SO (figure 6b; 2 stages, 5 micro-batches): passes hide transfers.

        0  F0 F1 F2 F3 B0 F4 B1  . B2  . B3 B4
        1   . F0 F1 B0 F2 B1 F3 B2 F4 B3 B4  .

    K_n = min(2(N-n), M), or fewer if `in_flight` requires.
    """
    return one_f_one_b(stages, microbatches, depths(stages, 2, in_flight))


def pipedream(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """1F1B without a flush (PipeDream, section 3.2; here 3 stages, mini-batches of 1 micro-batch).

        0  F0 F1 F2  .  .  .  . B0 U0 F3 B1 U1 F4 B2 U2 ...
        1   . F0 F1  .  . B0 U0 F2 B1 U1 F3 B2 U2 F4 ...
        2   .  . F0 B0 U0 F1 B1 U1 F2 B2 U2 F3 B3 U3 ...

    Without `in_flight`, stage n has N-n forwards in flight: PipeDream's number of optimal active
    mini-batches (NOAM).
    """
    return one_f_one_b(stages, microbatches, in_flight)


def data_parallel(
    stages: int, microbatches: int, in_flight: Sequence[int] | None, workers: int
) -> Schedule:
    """Every worker has all stages and runs the same row (here 3 stages, 2 micro-batches).

        0  0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 2A 1B1 1A 0B1 0A 0U 1U 2U

    The gradients of a stage are summed over its replicas (A) while the previous stages still
    compute; with a single stage, the sum comes at the end. Raises `ScheduleError` for several
    workers: all devices are replicas of one worker.
    """
    if workers != 1:
        raise ScheduleError(
            f"data-parallel has one worker, not {workers}, and all devices are its replicas: give "
            "every stage the same devices"
        )
    order = range(stages)
    return (
        tuple(
            Action(stage, op, microbatch)
            for microbatch in range(microbatches)
            for op, way in ((Op.FORWARD, order), (Op.BACKWARD, reversed(order)))
            for stage in way
        ),
    )


def depths(stages: int, times: int, in_flight: Sequence[int] | None) -> list[int]:
    """Return, for each stage n, the product of `times` and N-n, or the entry of `in_flight` if that
    is less."""
    deep = [times * (stages - stage) for stage in range(stages)]
    return [min(pair) for pair in zip(deep, in_flight or deep, strict=True)]


def fbp(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """BaPipe's FBP-AS, for asynchronous devices (figure 5b; 2 stages, 3 micro-batches, B = F).

        worker 0 lane 0  F0 F1 F2  .  .  .  .  .
        worker 0 lane 1   .  .  .  . B0  . B1 B2
        worker 1 lane 0   . F0 F1 F1 F2 F2  .  .
        worker 1 lane 1   .  . B0 B0 B1 B1 B2  .

    While both lanes of a worker compute, each pass takes twice as long. Row 2n has the forwards of
    stage n, row 2n+1 its backwards. Stage n keeps min(2(N-n), M) micro-batches, or fewer if
    `in_flight` requires: the next forward waits for a backward to end.
    """
    bounds = depths(stages, 2, in_flight)
    return tuple(
        tuple(lane(stage, microbatches, bounds[stage]))
        for stage in range(stages)
        for lane in (_forwards, _backwards)
    )


def _forwards(stage: int, microbatches: int, bound: int) -> Iterator[Action]:
    for number in range(microbatches):
        if number >= bound:
            yield Action(stage, Op.RECV_VACANT, number - bound)
        yield Action(stage, Op.FORWARD, number)
        yield Action(stage, Op.SEND_KEPT, number)


def _backwards(stage: int, microbatches: int, bound: int) -> Iterator[Action]:
    for number in range(microbatches):
        yield Action(stage, Op.RECV_KEPT, number)
        yield Action(stage, Op.BACKWARD, number)
        if number + bound < microbatches:
            yield Action(stage, Op.SEND_VACANT, number)
