"""Completion: adds transfers, updates, sums and tied parameters, which follow from the passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import PEERS, PER_MINI_BATCH, TIED_OPS, Action, Op, Schedule
from hetpipe.schedule.codes import CODES, are
from hetpipe.schedule.columns import Columns

Tied = Sequence[tuple[int, Sequence[int]]]
"""Parameters that stages share: (owner stage, the other stages)."""

Pair = tuple[int, int]  # owner and another stage

WEIGHTS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)  # the passes that make gradients of weights

LAST = (
    Op.ALL_REDUCE, Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD,
    Op.UPDATE, Op.SEND_TIED_PARAM, Op.RECV_TIED_PARAM,
)  # fmt: skip
"""The operations that follow a stage's backwards, in this order."""
OWNER = (Op.RECV_TIED_GRAD, Op.SEND_TIED_PARAM)
OTHER = (Op.SEND_TIED_GRAD, Op.RECV_TIED_PARAM)


def tied_pairs(stages: int, tied: Tied) -> list[Pair]:
    """Return each pair of an owner and another stage once. Raises `ScheduleError` for invalid
    stages."""
    pairs = sorted({(owner, other) for owner, others in tied for other in others})
    for owner, other in pairs:
        if owner == other or not (0 <= owner < stages and 0 <= other < stages):
            raise ScheduleError(
                f"tied stages {owner} and {other}: give two different stages of 0..{stages - 1}"
            )
    return pairs


def complete_passes(
    passes: Columns, stages: int, pairs: Sequence[Pair], replicas: Sequence[int]
) -> Columns:
    """Return the passes with transfers, sums over replicas, and an update of each stage at the end
    of its row.

    A stage's sum comes right after its last backward. A worker may own one tied parameter and share
    another one that a different worker owns. So that the two workers never wait for each other, a
    row has all sends of tied gradients before its receives of tied gradients, and likewise for tied
    parameters.
    """
    backwards = np.flatnonzero(are(passes.codes, WEIGHTS))[::-1]
    own, latest = np.unique(passes.stages[backwards], return_index=True)
    last = backwards[latest]  # index of each stage's last backward
    end = dict(zip(own.tolist(), passes.ends[passes.rows[last]].tolist(), strict=True))
    added = [(place, LAST.index(Op.UPDATE), n, 0) for n, place in end.items()]
    if replicas:
        sums = zip(own.tolist(), last.tolist(), strict=True)
        added += [(place + 1, 0, n, 0) for n, place in sums if replicas[n] > 1]
    for owner, other in pairs:
        for here, there, ops in ((owner, other, OWNER), (other, owner, OTHER)):
            added += [(end[here], LAST.index(op), here, there) for op in ops if here in end]
    return with_transfers(_inserted(passes, sorted(added)), stages)


def _inserted(passes: Columns, added: Sequence[tuple[int, int, int, int]]) -> Columns:
    """Insert actions into the passes; `added` has places, indices of `LAST`, stages and numbers."""
    if not added:
        return passes
    places, ops, *others = np.array(added).T
    codes = np.array([CODES[op] for op in LAST])[ops]
    rows = np.bincount(passes.rows[places - 1], minlength=len(passes))
    return Columns(np.insert(passes.table, places, [codes, *others], axis=1), passes.lengths + rows)


def with_updates(row: Sequence[Action], microbatches: int) -> Iterator[Action]:
    """Yield the row's actions, and each stage's update right after its last backward of a
    mini-batch."""
    done: Counter[tuple[int, int]] = Counter()
    for action in row:
        yield action
        if action.op in WEIGHTS:
            mini_batch = action.number // microbatches
            done[action.stage, mini_batch] += 1
            if done[action.stage, mini_batch] == microbatches:
                yield Action(action.stage, Op.UPDATE, mini_batch)


def with_tied(
    row: Sequence[Action], microbatches: int, mini_batches: int, pairs: Sequence[Pair]
) -> Iterator[Action]:
    """Yield the row's actions, and the messages about its tied parameters under an asynchronous
    schedule.

    Right before its first forward of a mini-batch the owner sends the version for this mini-batch.
    Right before its own first forward of the mini-batch another stage receives this version. So a
    stage waits only for messages that left before the forward for which it waits anyway. Right
    after its last backward of the mini-batch the other stage sends its gradient, and the owner
    receives the gradient right before its update. The row ends with the present version.
    """
    if not row:
        return
    ops: dict[Op, list[int]] = {op: [] for op in (*OWNER, *OTHER)}
    for owner, other in pairs:
        for here, there, mine in ((owner, other, OWNER), (other, owner, OTHER)):
            if here == row[0].stage:
                for op in mine:
                    ops[op].append(there)

    def messages(mini_batch: int, *of: Op) -> Iterator[Action]:
        for op in of:
            for peer in ops[op]:
                yield Action(row[0].stage, op, peer + PEERS * mini_batch)

    for action in row:
        if action.op is Op.FORWARD and action.number % microbatches == 0:
            yield from messages(
                action.number // microbatches, Op.SEND_TIED_PARAM, Op.RECV_TIED_PARAM
            )
        elif action.op is Op.UPDATE:
            yield from messages(action.number, Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD)
        yield action
    yield from messages(mini_batches, Op.SEND_TIED_PARAM, Op.RECV_TIED_PARAM)


def with_transfers(passes: Columns, stages: int) -> Columns:
    """Add a receive right before the pass that reads the message, and a send right after the pass
    that makes the message."""
    forward = passes.codes == CODES[Op.FORWARD]
    backward = are(passes.codes, (Op.BACKWARD, Op.BACKWARD_INPUT))
    first, last = passes.stages == 0, passes.stages == stages - 1
    receives, sends = forward & ~first | backward & ~last, forward & ~last | backward & ~first
    counts = 1 + receives + sends
    ends = np.cumsum(counts)
    table = np.repeat(passes.table, counts, axis=1)
    for own, receive, send in (
        (forward, Op.RECV_FORWARD, Op.SEND_FORWARD),
        (backward, Op.RECV_BACKWARD, Op.SEND_BACKWARD),
    ):
        table[0, (ends - counts)[own & receives]] = CODES[receive]
        table[0, ends[own & sends] - 1] = CODES[send]
    return Columns(table, np.diff(np.concatenate(([0], ends))[passes.ends], prepend=0))


Closing = frozenset[tuple[int, Op]]  # pairs of a stage and an operation


def closing(schedule: Schedule) -> Closing:
    """Return each (stage, operation) in which the operation is the stage's last on a
    micro-batch."""
    last: dict[int, dict[int, Op]] = {}
    for action in (action for row in schedule for action in row):
        if action.op not in (*PER_MINI_BATCH, *TIED_OPS):
            last.setdefault(action.stage, {})[action.number] = action.op
    return frozenset((stage, op) for stage, ops in last.items() for op in ops.values())
