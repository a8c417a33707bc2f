"""Completion: transfers, updates and tied parameters, which follow from the order of passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op

Tied = Sequence[tuple[int, Sequence[int]]]
"""Parameters that stages share: (owner stage, the other stages)."""

Pair = tuple[int, int]  # owner and another stage

WEIGHTS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)  # an update waits for them
PASSES = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)  # they read and make cut tensors


def tied_pairs(stages: int, tied: Tied) -> list[Pair]:
    """Each owner with each other stage, once. Raises `ScheduleError` for stages that do not fit."""
    pairs = sorted({(owner, other) for owner, others in tied for other in others})
    for owner, other in pairs:
        if owner == other or not (0 <= owner < stages and 0 <= other < stages):
            raise ScheduleError(f"tied stages {owner} and {other}: need two of 0..{stages - 1}")
    return pairs


def flushed(
    row: Sequence[Action], stages: int, pairs: Sequence[Pair], replicas: Sequence[int]
) -> Iterator[Action]:
    """A worker's passes with transfers and sums over replicas, its stages' updates at the end.

    Sends come before receives on both sides of the updates: a worker may own one tied parameter
    and borrow another.
    """
    yield from with_transfers([*_with_sums(row, replicas)], stages)
    own = sorted({action.stage for action in row if action.op in WEIGHTS})
    owned = [pair for stage in own for pair in pairs if pair[0] == stage]
    borrowed = [pair for stage in own for pair in pairs if pair[1] == stage]
    yield from (Action(other, Op.SEND_TIED_GRAD, owner) for owner, other in borrowed)
    yield from (Action(owner, Op.RECV_TIED_GRAD, other) for owner, other in owned)
    yield from (Action(stage, Op.UPDATE) for stage in own)
    yield from (Action(owner, Op.SEND_TIED_PARAM, other) for owner, other in owned)
    yield from (Action(other, Op.RECV_TIED_PARAM, owner) for owner, other in borrowed)


def _with_sums(row: Sequence[Action], replicas: Sequence[int]) -> Iterator[Action]:
    """Adds the sum over a stage's replicas right after the last of its backwards."""
    last = {action.stage: action for action in row if action.op in WEIGHTS}
    for action in row:
        yield action
        n = action.stage
        if action == last.get(n) and replicas and replicas[n] > 1:
            yield Action(n, Op.ALL_REDUCE)


def with_updates(row: Sequence[Action], microbatches: int) -> Iterator[Action]:
    """Adds each stage's update right after the last of a mini-batch's backwards."""
    done: Counter[tuple[int, int]] = Counter()
    for action in row:
        yield action
        if action.op in WEIGHTS:
            mini_batch = action.number // microbatches
            done[action.stage, mini_batch] += 1
            if done[action.stage, mini_batch] == microbatches:
                yield Action(action.stage, Op.UPDATE, mini_batch)


def with_transfers(row: Sequence[Action], stages: int) -> Iterator[Action]:
    """Adds a receive right before the pass that reads it, a send right after its own pass."""
    for action in row:
        if action.op not in PASSES:
            yield action
            continue
        first, last = action.stage == 0, action.stage == stages - 1
        forward = action.op is Op.FORWARD
        if not (first if forward else last):
            receive = Op.RECV_FORWARD if forward else Op.RECV_BACKWARD
            yield Action(action.stage, receive, action.number)
        yield action
        if not (last if forward else first):
            send = Op.SEND_FORWARD if forward else Op.SEND_BACKWARD
            yield Action(action.stage, send, action.number)
