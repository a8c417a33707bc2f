"""Requirements: the actions that a stage must have in the pipeline, and their order."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from hetpipe.schedule.action import GRADIENTS, PEERS, TIED_OPS, Action, Op
from hetpipe.schedule.complete import WEIGHTS
from hetpipe.schedule.turns import round_of

GRADS = (Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD)
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
    peers: Mapping[int, Collection[tuple[Op, int]]]
    """Without flushes, by stage: operations for tied parameters, with the other stage."""

    def tied(self, stage: int, mini_batch: int, ops: Sequence[Op]) -> Iterator[Action]:
        """Yield the stage's actions of these operations for the tied parameters of a mini-batch."""
        for op, peer in self.peers.get(stage, ()):
            if op in ops:
                yield Action(stage, op, peer + PEERS * mini_batch)

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


def needed_by(
    action: Action, shape: Shape, row: Sequence[Action], losses: Sequence[Action]
) -> Iterator[Action]:
    """Yield the actions of `row` that must come before `action`, which is on the same row.

    `losses` are the losses of the row.
    """
    n, op, number = action.stage, action.op, action.number
    halved = n in shape.halved
    if op is Op.FORWARD:
        if n > 0:
            yield Action(n, Op.RECV_FORWARD, number)
        if number % shape.microbatches == 0:
            parameters = (Op.SEND_TIED_PARAM, Op.RECV_TIED_PARAM)
            yield from shape.tied(n, number // shape.microbatches, parameters)
    elif op in (Op.SEND_FORWARD, Op.SEND_KEPT):
        yield Action(n, Op.FORWARD, number)
    elif op is Op.LOSS:
        yield from (a for a in row if a.stage == n and a.op is Op.FORWARD)
    elif op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        yield from (a for a in losses if a.stage == n)
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
        most = number // PEERS if op in TIED_OPS else number
        for a in row:
            if a.stage == n and a.op in WEIGHTS and a.number // shape.microbatches <= most:
                yield a
    elif op is Op.UPDATE:
        yield from shape.tied(n, number, GRADS)
        summing = (Op.ALL_REDUCE, *GRADIENTS, *GRADS)
        for a in row:
            mini_batch = a.number // (PEERS if a.op in GRADS else 1)
            if a.stage == n and a.op in summing and mini_batch <= number:
                yield a
    elif op in (Op.SEND_TIED_PARAM, Op.RECV_TIED_PARAM) and not shape.peers:
        yield Action(n, Op.UPDATE)
