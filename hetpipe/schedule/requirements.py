"""Requirements: the actions that a stage must have in the pipeline, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hetpipe.schedule.action import GRADIENTS, Action, Op
from hetpipe.schedule.complete import WEIGHTS
from hetpipe.schedule.turns import round_of

HALVES = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
BACKWARDS = (Op.BACKWARD, *HALVES)


class Shape(NamedTuple):
    """The traits of a schedule on which the actions of a stage depend."""

    stages: int
    halved: set[int]  # stages with backwards in halves
    laned: set[int]  # stages with forwards and backwards on two lanes
    microbatches: int
    places: Sequence[tuple[int, int]]  # stage and replica of each row; empty without turns
    replicas: Sequence[int]  # number of replicas by stage
    per_update: Sequence[int]  # mini-batches that one update applies, by stage
    one_by_one: bool  # whether replicas send each other the gradients of each mini-batch

    def owner(self, stage: int, mini_batch: int) -> int:
        """Return the replica that runs a mini-batch."""
        return mini_batch % self.replicas[stage]


def required_of(
    stage: int, shape: Shape, mini_batches: Sequence[int], updates: Sequence[int]
) -> Iterator[Action]:
    count = shape.microbatches
    microbatches = [b * count + place for b in mini_batches for place in range(count)]
    ops = [Op.FORWARD, *(HALVES if stage in shape.halved else (Op.BACKWARD,))]
    if stage in shape.laned:
        ops += [Op.SEND_KEPT, Op.RECV_KEPT]
    if stage > 0:
        ops += [Op.RECV_FORWARD, Op.SEND_BACKWARD]
    if stage < shape.stages - 1:
        ops += [Op.SEND_FORWARD, Op.RECV_BACKWARD]
    yield from (Action(stage, op, number) for op in ops for number in microbatches)
    for number in updates:
        yield Action(stage, Op.UPDATE, number)
        if shape.one_by_one:
            op = Op.SEND_GRAD if number in mini_batches else Op.RECV_GRAD
            yield Action(stage, op, number)


def applied_by(action: Action, shape: Shape, row: int) -> Iterator[Action]:
    """Yield the backwards, on the row of an update, whose gradients the update applies."""
    n, count = action.stage, shape.per_update[action.stage]
    last = Op.BACKWARD_WEIGHT if n in shape.halved else Op.BACKWARD
    for mini_batch in round_of(action.number, count, action.number + 1):
        if not shape.places or shape.places[row][1] == shape.owner(n, mini_batch):
            first = mini_batch * shape.microbatches
            yield from (Action(n, last, first + i) for i in range(shape.microbatches))


def needed_by(action: Action, shape: Shape, row: Sequence[Action]) -> Iterator[Action]:
    """Yield the actions of `row` that must come before `action`, which is on the same row."""
    n, op, number = action.stage, action.op, action.number
    halved = n in shape.halved
    if op is Op.FORWARD and n > 0:
        yield Action(n, Op.RECV_FORWARD, number)
    elif op in (Op.SEND_FORWARD, Op.SEND_KEPT):
        yield Action(n, Op.FORWARD, number)
    elif op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        yield Action(n, Op.RECV_KEPT if n in shape.laned else Op.FORWARD, number)
        if n < shape.stages - 1:
            yield Action(n, Op.RECV_BACKWARD, number)
    elif op is Op.BACKWARD_WEIGHT:
        yield Action(n, Op.BACKWARD_INPUT, number)
    elif op is Op.SEND_BACKWARD:
        yield Action(n, Op.BACKWARD_INPUT if halved else Op.BACKWARD, number)
    elif op is Op.SEND_VACANT:
        yield Action(n, Op.BACKWARD_WEIGHT if halved else Op.BACKWARD, number)
    elif op in (Op.ALL_REDUCE, Op.SEND_GRAD, Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD):
        # All backwards of the row, so that gradients are always summed in one order.
        most = number if op in (Op.ALL_REDUCE, Op.SEND_GRAD) else 0
        for a in row:
            if a.stage == n and a.op in WEIGHTS and a.number // shape.microbatches <= most:
                yield a
    elif op is Op.UPDATE:
        summing = (Op.ALL_REDUCE, *GRADIENTS, Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD)
        for a in row:
            later = a.op in (Op.ALL_REDUCE, *GRADIENTS) and a.number > number
            if a.stage == n and a.op in summing and not later:
                yield a
    elif op in (Op.SEND_TIED_PARAM, Op.RECV_TIED_PARAM):
        yield Action(n, Op.UPDATE)
