"""Turns: replicas of a stage take whole mini-batches in turn (PipeDream's 1F1B-RR, section 3.2).

Replica r of R takes mini-batches r, r + R, ... A round is one mini-batch of each replica; after a
round the replicas sum their gradients and update once. Such a schedule has a row for every replica
of every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.complete import WEIGHTS

Passes = Callable[[int], Schedule]  # number of micro-batches -> the passes of each stage


def places(replicas: Sequence[int]) -> list[tuple[int, int]]:
    """Return stage and replica of every row."""
    return [(stage, replica) for stage, count in enumerate(replicas) for replica in range(count)]


def noam(replicas: Sequence[int]) -> list[int]:
    """Return, per stage, how many forwards in flight at each replica keep all workers busy: the
    number of workers from that stage on, divided by the stage's replicas and rounded up (PipeDream,
    section 3.2)."""
    return [-(-sum(replicas[stage:]) // count) for stage, count in enumerate(replicas)]


def round_of(mini_batch: int, replicas: int, mini_batches: int) -> range:
    """Return the mini-batches of the round of `mini_batch`; the last round may have fewer."""
    first = mini_batch - mini_batch % replicas
    return range(first, min(first + replicas, mini_batches))


def in_turn(
    passes: Passes, microbatches: int, mini_batches: int, replicas: Sequence[int]
) -> Schedule:
    """Return the passes and updates of every replica. A replica runs its mini-batches in the order
    of `passes`. The sum and the update of a round have the number of the round's last
    mini-batch."""
    rows = []
    for stage, replica in places(replicas):
        own = range(replica, mini_batches, replicas[stage])
        row = passes(len(own) * microbatches)[stage] if own else ()
        rows.append(tuple(_row(row, stage, own, microbatches, mini_batches, replicas[stage])))
    return tuple(rows)


def _row(
    row: Sequence[Action],
    stage: int,
    own: range,
    microbatches: int,
    mini_batches: int,
    replicas: int,
) -> Iterator[Action]:
    done = dict.fromkeys(own, 0)
    updated = -1
    for action in row:
        turn, place = divmod(action.number, microbatches)
        mini_batch = own[turn]
        yield Action(stage, action.op, mini_batch * microbatches + place)
        if action.op in WEIGHTS:
            done[mini_batch] += 1
            if done[mini_batch] == microbatches:
                updated = round_of(mini_batch, replicas, mini_batches)[-1]
                yield from _update(stage, updated, replicas)
    if updated < mini_batches - 1:  # this replica has no mini-batch in the last round
        yield from _update(stage, mini_batches - 1, replicas)


def _update(stage: int, number: int, replicas: int) -> Iterator[Action]:
    if replicas > 1:
        yield Action(stage, Op.ALL_REDUCE, number)
    yield Action(stage, Op.UPDATE, number)


def asp(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """Asynchronous data parallelism with one stage: a forward, its backward, the next forward, ...

    Every replica has the whole model, and the gradient of each mini-batch makes an update. The ASP
    in PipeDream's comparisons applies gradients in the order of their arrival, so no two runs are
    equal. Here all replicas apply the gradients in the order of mini-batches, so they have the same
    weights. A replica waits only for the gradients of earlier mini-batches. With 2 replicas:

        0  F0 B0 SA0 U0 F2 B2 SA2 RA1 U1 U2 F4 ...
        1  F1 B1 SA1 RA0 U0 U1 F3 B3 SA3 RA2 U2 U3 ...

    With R replicas, a replica begins mini-batch b after it has applied its previous mini-batch,
    b-R. So the weights for mini-batch b have had b-R+1 updates, and its gradient is applied R-1
    updates late. Raises `ScheduleError` for several stages.
    """
    if stages != 1:
        raise ScheduleError(
            f"asp has 1 stage, not {stages}, since every replica has the whole model: remove "
            "cuts, or use pipedream, which allows replicas of stages"
        )
    numbers = range(microbatches)
    return (tuple(Action(0, op, m) for m in numbers for op in (Op.FORWARD, Op.BACKWARD)),)


def one_by_one(passes: Schedule, microbatches: int, mini_batches: int, replicas: int) -> Schedule:
    """Return a row for each replica, with its mini-batches' passes and all mini-batches' updates.

    `passes` has one row, with the forwards and backwards of all `mini_batches`.
    """
    rows = range(replicas)
    return tuple(
        tuple(_asp_row(passes[0], row, microbatches, mini_batches, replicas)) for row in rows
    )


def _asp_row(
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
