"""Tables: a fast test that a plain schedule is valid, by comparing all its actions together.

The table is an array with a cell for each stage, operation and micro-batch; the cell has the index
of that action. The validator runs this test first. If a schedule fails, the validator reads the
actions one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetpipe.schedule.action import Op, Schedule
from hetpipe.schedule.codes import CODES, OPS, Array
from hetpipe.schedule.columns import Columns, columns_of

_OPS = (
    Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT,
    Op.RECV_FORWARD, Op.SEND_FORWARD, Op.RECV_BACKWARD, Op.SEND_BACKWARD, Op.UPDATE,
)  # fmt: skip
F, B, I, W, RF, SF, RB, SB, U = range(len(_OPS))  # noqa: E741 - the letters of actions
ABSENT = -1
_PLANES = np.full(len(OPS), ABSENT)
_PLANES[[CODES[op] for op in _OPS]] = range(len(_OPS))

BEFORE = ((RF, F), (F, SF), (F, B), (F, I), (RB, B), (RB, I), (I, W), (B, SB), (I, SB))
"""Pairs of a stage's operations on one micro-batch: the first comes before the second, if both
exist."""


def is_valid(schedule: Schedule, microbatches: int, in_flight: Sequence[int] | None = None) -> bool:
    """Whether a schedule of one mini-batch certainly passes `validate`. False decides nothing: the
    test knows no tied parameters, sums over replicas or lanes."""
    columns = columns_of(schedule)
    at = _places(columns, microbatches)
    return (
        at is not None
        and _is_complete(at)
        and _is_ordered(at)
        and (in_flight is None or _is_within(at, in_flight))
        and _in_one_order(at[:-1, SF], at[1:, RF])
        and _in_one_order(at[1:, SB], at[:-1, RB])
        and columns.order is not None
    )


def _places(columns: Columns, microbatches: int) -> Array | None:
    """Return a table [stage, operation, micro-batch] of the indices of actions, counted through all
    rows; None if an action has no cell in the table, or if two actions have the same cell."""
    stages, planes, numbers = columns.stages, _PLANES[columns.codes], columns.numbers
    if not len(stages) or min(stages.min(), planes.min(), numbers.min()) < 0:
        return None
    if numbers.max() >= microbatches or stages.max() >= len(stages):
        return None
    shape = 1 + int(stages.max()), len(_OPS), microbatches
    cells = np.ravel_multi_index((stages, planes, numbers), shape)
    indices = np.arange(len(cells), dtype=np.int32)
    at = np.full(shape, ABSENT, np.int32)
    at.ravel()[cells] = indices
    return at if (at.ravel()[cells] == indices).all() else None


def _is_complete(at: Array) -> bool:
    """Whether every stage has exactly the actions that its place in the pipeline requires."""
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
    """Whether each stage has at most its allowed number of forwards in flight."""
    forwards = np.sort(at[:, F])
    ends = np.sort(np.where(at[:, B] == ABSENT, at[:, W], at[:, B]))
    turn = np.arange(at.shape[2])
    # Each forward must come after the end with this number; below 0: after none.
    before = turn - np.array(in_flight)[:, None]
    enough = (before < 0) | (forwards > np.take_along_axis(ends, np.maximum(before, 0), axis=1))
    return bool(enough.all())


def _in_one_order(sends: Array, receives: Array) -> bool:
    """Whether the messages of edges are received in the order in which they are sent."""
    return bool((np.argsort(sends) == np.argsort(receives)).all())
