"""Zero bubble: backwards in two halves; other stages wait only for the first (Qi et al., 2023).

I makes the gradients of the inputs for the stage before. W makes those of the weights, which are
needed only for the update; so it fills time that would be a bubble.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op, Schedule

F, I, W = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741


def zb_h1(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """1F1B whose stage n is n weight gradients late (Qi et al., section 2.1; 3 stages, M = 4).

        0  F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
        1   . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2   .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Every stage keeps min(N, M) micro-batches, as the first stage of 1F1B does, or as `in_flight`
    allows. While W <= min(F, I) and M >= N the bubble is (N-1)(F+I-W) in place of (N-1)(F+I+W): a
    third where F = I = W.
    """
    bounds = in_flight or [stages] * stages
    return tuple(
        tuple(_late_weights(stage, stages, microbatches, bounds[stage])) for stage in range(stages)
    )


def _late_weights(stage: int, stages: int, microbatches: int, bound: int) -> Iterator[Action]:
    depth = min(stages - stage, microbatches, bound)
    late = min(stage, microbatches, bound - depth)
    for number in range(depth):
        yield Action(stage, F, number)
    for number in range(microbatches):
        yield Action(stage, I, number)
        if number >= late:
            yield Action(stage, W, number - late)
        if number + depth < microbatches:
            yield Action(stage, F, number + depth)
    for number in range(microbatches - late, microbatches):
        yield Action(stage, W, number)


def zb_v(stages: int, microbatches: int, in_flight: Sequence[int] | None, workers: int) -> Schedule:
    """Two stages per worker in the shape of a V (Qi et al.; 2 workers, M = 4; the first half).

        0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 ...
        1   .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 ...

    Of D workers, worker w has the stages w and 2D-1-w, so the first has the loss. Each keeps at
    most 2D halves of a micro-batch, the same as 1F1B's first worker. From M = 2D on no worker waits
    between its first pass and its last where F = I = W. Raises `ScheduleError` unless there are two
    stages per worker.
    """
    if stages != 2 * workers:
        raise ScheduleError(
            f"zb-v puts two stages on each worker: cut into {2 * workers} for {workers} workers, "
            f"not into {stages}"
        )
    enough = max(microbatches, 2 * workers - 1)  # more passes are dropped
    return tuple(
        tuple(a for a in _vee(worker, workers, enough) if a.number < microbatches)
        for worker in range(workers)
    )


def _vee(worker: int, workers: int, microbatches: int) -> Iterator[Action]:
    done: Counter[tuple[Op, int]] = Counter()
    for op, stage in _vee_order(worker, workers, microbatches):
        yield Action(stage, op, done[op, stage])
        done[op, stage] += 1


def _vee_order(worker: int, workers: int, microbatches: int) -> Iterator[tuple[Op, int]]:
    down, up = worker, 2 * workers - 1 - worker
    to_turn = workers - worker  # workers from here to the turn
    backward_up, backward_down = [(I, up), (W, up)], [(I, down), (W, down)]
    # Fill: forwards on the way down, then on both, then the first backwards.
    yield from [(F, down)] * (2 * to_turn - 1)
    yield from [(F, up), (F, down)] * worker
    yield from [(F, up), *backward_up] * to_turn
    # Steady: one of everything.
    for turn in range(microbatches - workers):
        if turn + workers + to_turn - 1 < microbatches:
            yield F, down
        yield from [*backward_down, (F, up), *backward_up]
    # Drain: first the passes that other workers wait for.
    yield from [(I, down), (I, up)] * worker
    yield from backward_down * to_turn
    yield from [(W, up)] * worker + [(W, down)] * worker
