"""Zero bubble: backwards in two halves; other stages wait only for the first (Qi et al., 2023).

The half I makes the gradients of the inputs, which the previous stage needs. The half W makes the
gradients of the weights, which only the update needs. So W can fill time in which the worker would
wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Op, Schedule
from hetpipe.schedule.codes import CODES, Array
from hetpipe.schedule.columns import Columns, Turns, in_turns

F, I, W = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741


def zb_h1(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """1F1B whose stage n delays each W by n micro-batches (Qi et al., section 2.1; N = 3, M = 4).

        0  F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
        1   . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2   .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Every stage keeps min(N, M) micro-batches, as the first stage of 1F1B does, or as many as
    `in_flight` allows. If W <= min(F, I) and M >= N, the bubble is (N-1)(F+I-W) instead of 1F1B's
    (N-1)(F+I+W): a third if F = I = W.
    """
    rows, numbers = np.arange(stages)[:, None], np.arange(microbatches)
    bounds = np.array(in_flight or [stages] * stages)[:, None]
    deep = np.minimum(np.minimum(stages - rows, microbatches), bounds)
    late = np.minimum(np.minimum(rows, microbatches), bounds - deep)
    return in_turns(
        (
            Turns(I, 0 * rows, rows, numbers),
            Turns(W, late, rows, numbers),
            Turns(F, -deep, rows, numbers),
        ),
        microbatches,
    )


def zb_v(stages: int, microbatches: int, in_flight: Sequence[int] | None, workers: int) -> Schedule:
    """Two stages per worker in the shape of a V (Qi et al.; 2 workers, M = 4; start of the rows).

        0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 ...
        1   .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 ...

    Worker w of D has the stages w and 2D-1-w, so the first worker has the loss. Each worker keeps
    at most 2D micro-batches, counted over its two stages. That is as much memory as 1F1B's first
    worker needs for D micro-batches of a stage that is twice as large. With M >= 2D and F = I = W,
    no worker waits between its first pass and its last pass. Raises `ScheduleError` unless there
    are two stages per worker.
    """
    if stages != 2 * workers:
        raise ScheduleError(
            f"zb-v puts two stages on each worker: cut into {2 * workers} for {workers} workers, "
            f"not into {stages}"
        )
    enough = max(microbatches, 2 * workers - 1)  # passes of further micro-batches are dropped below
    rows = [_vee(worker, workers, enough) for worker in range(workers)]
    table = np.concatenate(rows, axis=1)
    kept = table[2] < microbatches
    return Columns(table[:, kept], np.array([(row[2] < microbatches).sum() for row in rows]))


def _vee(worker: int, workers: int, microbatches: int) -> Array:
    """Return the three columns of a row. Each operation of a stage runs micro-batches 0, 1, ..."""
    order = np.array(_vee_order(worker, workers, microbatches))
    numbers = np.empty(len(order), np.int64)
    for code in (F, I, W):
        for stage in (worker, 2 * workers - 1 - worker):
            same = (order[:, 0] == CODES[code]) & (order[:, 1] == stage)
            numbers[same] = np.arange(same.sum())
    return np.array([*order.T, numbers])


def _vee_order(worker: int, workers: int, microbatches: int) -> list[tuple[int, int]]:
    """Return, for each pass of a row, the operation's code and the stage."""
    stages = worker, 2 * workers - 1 - worker
    (f_down, f_up), (i_down, i_up), (w_down, w_up) = (
        [[(CODES[op], stage)] for stage in stages] for op in (F, I, W)
    )
    down, up = i_down + w_down, i_up + w_up
    to_turn = workers - worker  # workers from this one to the turn of the V, both included
    steady = microbatches - workers
    last = max(0, steady - to_turn + 1)  # steady rounds that still have a forward on the way down
    return [
        # Fill: forwards on the way down, then forwards on both ways, then the first backwards.
        *f_down * (2 * to_turn - 1), *(f_up + f_down) * worker, *(f_up + up) * to_turn,
        # Steady: in each round, one pass of each kind on each way.
        *(f_down + down + f_up + up) * last, *(down + f_up + up) * (steady - last),
        # Drain: first the passes that other workers wait for.
        *(i_down + i_up) * worker, *down * to_turn, *w_up * worker, *w_down * worker,
    ]  # fmt: skip
