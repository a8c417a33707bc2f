"""Turns: replicas of a stage take whole mini-batches in turn (PipeDream's 1F1B-RR, section 3.2).

Replica r of R takes mini-batches r, r + R, ... A round is one mini-batch of each replica; after it
they sum their gradients and update once. Such a schedule has a row for every replica of every
stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.complete import WEIGHTS

Passes = Callable[[int], Schedule]
"""Number of micro-batches -> the passes of each stage, in order."""


def places(replicas: Sequence[int]) -> list[tuple[int, int]]:
    """Return stage and replica of every row."""
    return [(stage, replica) for stage, count in enumerate(replicas) for replica in range(count)]


def noam(replicas: Sequence[int]) -> list[int]:
    """Return, per stage, how many forwards in flight at each replica keep all workers busy: the
    workers from that stage on, divided by its replicas (PipeDream, section 3.2)."""
    return [-(-sum(replicas[stage:]) // count) for stage, count in enumerate(replicas)]


def round_of(mini_batch: int, replicas: int, mini_batches: int) -> range:
    """Return the mini-batches of a round; the last round may have fewer."""
    first = mini_batch - mini_batch % replicas
    return range(first, min(first + replicas, mini_batches))


def in_turn(
    passes: Passes, microbatches: int, mini_batches: int, replicas: Sequence[int]
) -> Schedule:
    """Return the passes and updates of every replica, with its mini-batches in order of `passes`.

    A round's sum and update have the number of its last mini-batch.
    """
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
