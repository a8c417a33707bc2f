"""Whether a plain schedule is valid, found by comparing tables of all its actions at once.

A table has a number for each stage, operation and micro-batch. The validator reads a schedule
action by action, since it must say what is wrong; it asks here first, and most schedules are right.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from hetpipe.schedule.action import Op, Schedule

Array = np.ndarray[Any, Any]

_OPS = (
    Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT,
    Op.RECV_FORWARD, Op.SEND_FORWARD, Op.RECV_BACKWARD, Op.SEND_BACKWARD, Op.UPDATE,
)  # fmt: skip
F, B, I, W, RF, SF, RB, SB, U = range(len(_OPS))  # noqa: E741 - the letters of actions
_CODES = {op: code for code, op in enumerate(_OPS)}
ABSENT = -1
DONE = (sys.maxsize, 0, 0)
"""In place of the receive at which a row waits: it is at its end."""

BEFORE = ((RF, F), (F, SF), (F, B), (F, I), (RB, B), (RB, I), (I, W), (B, SB), (I, SB))
"""Operations on a micro-batch in a stage: the first comes before the second, where both are."""


def is_valid(schedule: Schedule, microbatches: int, in_flight: Sequence[int] | None = None) -> bool:
    """Whether a schedule of one mini-batch is known to be valid; `validate` says what that means.

    False says nothing: schedules with tied parameters, sums over replicas or several lanes are left
    to the validator.
    """
    places = _places(schedule, microbatches)
    if places is None:
        return False
    at, worker_of = places
    return (
        _is_complete(at)
        and _is_ordered(at)
        and (in_flight is None or _is_within(at, in_flight))
        and all(_in_one_order(at[n, SF], at[n + 1, RF]) for n in range(len(at) - 1))
        and all(_in_one_order(at[n + 1, SB], at[n, RB]) for n in range(len(at) - 1))
        and _progresses(at, worker_of, len(schedule))
    )


def _places(schedule: Schedule, microbatches: int) -> tuple[Array, Array] | None:
    """The index in its row of each action, [stage, operation, micro-batch], and each stage's row.

    None if an action has no cell in such a table, or one that is taken.
    """
    actions = [*chain.from_iterable(schedule)]
    codes = np.fromiter((_CODES.get(a.op, ABSENT) for a in actions), np.int64, len(actions))
    stages = np.fromiter((a.stage for a in actions), np.int64, len(actions))
    numbers = np.fromiter((a.number for a in actions), np.int64, len(actions))
    if not actions or codes.min() < 0 or numbers.max() >= microbatches:
        return None
    count = int(stages.max()) + 1
    cells = (stages * len(_OPS) + codes) * microbatches + numbers
    if len(np.unique(cells)) < len(cells):
        return None
    lengths = [len(row) for row in schedule]
    rows = np.repeat(np.arange(len(schedule)), lengths)
    worker_of = np.full(count, ABSENT)
    worker_of[stages] = rows
    if (worker_of[stages] != rows).any():
        return None
    at = np.full(count * len(_OPS) * microbatches, ABSENT)
    at[cells] = np.concatenate([np.arange(length) for length in lengths])
    return at.reshape(count, len(_OPS), microbatches), worker_of


def _is_complete(at: Array) -> bool:
    """Whether every stage has just the actions that its place requires."""
    required = np.zeros(at.shape, bool)
    halved = (at[:, (I, W)] != ABSENT).any(axis=(1, 2))
    required[:, F] = True
    required[:, B] = ~halved[:, None]
    required[:, I] = required[:, W] = halved[:, None]
    required[1:, (RF, SB)] = True
    required[:-1, (SF, RB)] = True
    required[:, U, 0] = True
    return bool((required == (at != ABSENT)).all())


def _is_ordered(at: Array) -> bool:
    """Whether inputs come before passes, passes before outputs, and the update last."""
    for first, second in BEFORE:
        both = (at[:, first] != ABSENT) & (at[:, second] != ABSENT)
        if (both & (at[:, first] > at[:, second])).any():
            return False
    return bool((at[:, U, 0] == at.max(axis=(1, 2))).all())


def _is_within(at: Array, in_flight: Sequence[int]) -> bool:
    """Whether no more forwards of a stage wait for their backward than it may have."""
    for stage, most in zip(at, in_flight, strict=True):
        forwards = np.sort(stage[F])
        ends = np.sort(stage[B] if stage[B, 0] != ABSENT else stage[W])
        waiting = np.arange(1, len(forwards) + 1) - np.searchsorted(ends, forwards)
        if waiting.max() > most:
            return False
    return True


def _in_one_order(sends: Array, receives: Array) -> bool:
    """Whether an edge's messages are received in the order in which they are sent."""
    return bool((np.argsort(sends) == np.argsort(receives)).all())


def _progresses(at: Array, worker_of: Array, workers: int) -> bool:
    """Whether all rows come to their ends, where a receive waits for its send."""
    waits: list[list[tuple[int, int, int]]] = [[] for _ in range(workers)]
    for n in range(len(at) - 1):
        here, there = int(worker_of[n]), int(worker_of[n + 1])
        ahead = zip(at[n + 1, RF].tolist(), at[n, SF].tolist(), strict=True)
        back = zip(at[n, RB].tolist(), at[n + 1, SB].tolist(), strict=True)
        waits[there] += [(receive, here, send) for receive, send in ahead]
        waits[here] += [(receive, there, send) for receive, send in back]
    pending = [iter(sorted(own)) for own in waits]
    heads = [next(own, DONE) for own in pending]  # the receive at which each row waits
    moved = True
    while moved:
        moved = False
        for worker, (_, sender, send) in enumerate(heads):
            while heads[worker] is not DONE and heads[sender][0] > send:
                _, sender, send = heads[worker] = next(pending[worker], DONE)
                moved = True
    return all(head is DONE for head in heads)
