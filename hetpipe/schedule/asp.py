"""ASP: asynchronous data parallelism, with a fixed order of updates.

Every replica has the whole model and takes mini-batches in turn; each mini-batch's gradient makes
an update. The ASP in PipeDream's comparisons applies gradients in the order of their arrival, so
no two runs are equal. Here all replicas apply them in the order of mini-batches and have the same
weights. A replica waits for the gradients of mini-batches before its own, not for later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op, Schedule


def asp(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """One stage: a forward, its backward, the next (here 2 replicas with an update after each).

        0  F0 B0 SA0 U0 F2 B2 SA2 RA1 U1 U2 F4 ...
        1  F1 B1 SA1 RA0 U0 U1 F3 B3 SA3 RA2 U2 U3 ...

    One of R replicas begins mini-batch b after its previous one, b-R, is applied. So b-R+1 updates
    made the weights for the gradient of b, and the gradient is R-1 updates late.
    """
    if stages != 1:
        raise ScheduleError(
            f"asp has 1 stage, the whole model on every replica, not {stages}: leave out cuts, or "
            "use pipedream, whose stages may have replicas"
        )
    numbers = range(microbatches)
    return (tuple(Action(0, op, m) for m in numbers for op in (Op.FORWARD, Op.BACKWARD)),)


def one_by_one(passes: Schedule, microbatches: int, mini_batches: int, replicas: int) -> Schedule:
    """Return a row for each replica, with its mini-batches in turn and all updates.

    `passes` has the forwards and backwards of all `mini_batches`.
    """
    rows = range(replicas)
    return tuple(tuple(_row(passes[0], row, microbatches, mini_batches, replicas)) for row in rows)


def _row(
    passes: Sequence[Action], replica: int, microbatches: int, mini_batches: int, replicas: int
) -> Iterator[Action]:
    applied = 0
    for b in range(replica, mini_batches, replicas):
        yield from passes[2 * b * microbatches : 2 * (b + 1) * microbatches]
        yield Action(0, Op.SEND_GRAD, b)
        yield from _updates(range(applied, b + 1), replica, replicas)
        applied = b + 1
    yield from _updates(range(applied, mini_batches), replica, replicas)


def _updates(mini_batches: range, replica: int, replicas: int) -> Iterator[Action]:
    for b in mini_batches:
        if b % replicas != replica:
            yield Action(0, Op.RECV_GRAD, b)
        yield Action(0, Op.UPDATE, b)
