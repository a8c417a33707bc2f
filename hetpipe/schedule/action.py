"""Action: one operation of one stage; prints and parses as `2F0`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from hetpipe.errors import ScheduleError
from hetpipe.words import short, words

MOST_STAGE = 9_999
MOST_NUMBER = 999_999_999  # micro-batches are counted through all mini-batches
PEERS = MOST_STAGE + 1
"""The number of an action for tied parameters: the other stage + PEERS * the mini-batch. Under a
synchronous schedule the mini-batch is 0."""


class Op(str, Enum):
    """The operation of an action. The action's number names a micro-batch, unless a comment names
    something else. Micro-batches are numbered through all mini-batches of the schedule."""

    FORWARD = "F"
    BACKWARD = "B"  # both halves of a backward together
    BACKWARD_INPUT = "I"  # the half for which the previous stage waits: gradients of the inputs
    BACKWARD_WEIGHT = "W"  # the other half: gradients of the weights, added to their accumulators
    SEND_FORWARD = "SF"  # cut tensors to the next stage
    RECV_FORWARD = "RF"  # cut tensors from the previous stage
    SEND_BACKWARD = "SB"  # gradients to the previous stage
    RECV_BACKWARD = "RB"  # gradients from the next stage
    SEND_TIED_GRAD = "SG"  # to the stage that owns the tied parameter; number: see PEERS
    RECV_TIED_GRAD = "RG"  # from another stage that has the tied parameter
    SEND_KEPT = "SK"  # from lane to lane: a forward hands its kept tensors to its backward
    RECV_KEPT = "RK"
    SEND_VACANT = "SV"  # to the forwards' lane: a backward has ended, so a forward may begin
    RECV_VACANT = "RV"
    LOSS = "L"  # waits for the loss over a whole mini-batch; number: as for UPDATE
    ALL_REDUCE = "A"  # begins to sum gradients over the replicas; number: as for UPDATE
    SEND_GRAD = "SA"  # a mini-batch's gradients, to the other replicas; number: the mini-batch
    RECV_GRAD = "RA"  # gradients of the mini-batch `number`, which another replica ran
    UPDATE = "U"  # number: the mini-batch, 0 in a synchronous schedule; 0 is not printed
    SEND_TIED_PARAM = "SP"  # to another stage that has the tied parameter; number: see PEERS
    RECV_TIED_PARAM = "RP"  # from the stage that owns the tied parameter

    @property
    def is_compute(self) -> bool:
        """Whether the operation occupies the device: F, B, I, W and U."""
        return self.holds and self is not Op.LOSS

    @property
    def holds(self) -> bool:
        """Whether the operation takes time in its row and needs no message: L, and all that
        compute."""
        return len(self) == 1 and self is not Op.ALL_REDUCE

    @property
    def is_send(self) -> bool:
        """Whether the operation posts a message."""
        return self[0] == "S"

    @property
    def is_receive(self) -> bool:
        """Whether the operation waits for a message."""
        return self[0] == "R"


GRADIENTS = (Op.SEND_GRAD, Op.RECV_GRAD)
PER_MINI_BATCH = (Op.LOSS, Op.ALL_REDUCE, *GRADIENTS, Op.UPDATE)

AFTER_SUMS = (Op.UPDATE, Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD)
"""Operations that read or change summed gradients, and so wait for all sums that began before."""


TIED = frozenset({"G", "P"})  # kinds of messages: tied gradients, tied parameters
TIED_OPS = tuple(op for op in Op if op[-1] in TIED and len(op) == 2)


class Message(NamedTuple):
    """A message between two stages, or between two lanes or replicas of one stage.

    A send and its receive have the same message. The message with the gradients of a mini-batch
    goes to every other replica of the stage.
    """

    source: int  # stage
    target: int  # stage
    kind: str  # F, B, K, V: for a micro-batch; A: for a mini-batch; G, P: tied gradient, parameter
    number: int  # micro-batch; mini-batch for A, G and P


ENDS: dict[Op, tuple[str, int | None, int | None]] = {
    Op.SEND_FORWARD: ("F", 0, 1),
    Op.RECV_FORWARD: ("F", -1, 0),
    Op.SEND_BACKWARD: ("B", 0, -1),
    Op.RECV_BACKWARD: ("B", 1, 0),
    Op.SEND_TIED_GRAD: ("G", 0, None),
    Op.RECV_TIED_GRAD: ("G", None, 0),
    Op.SEND_TIED_PARAM: ("P", 0, None),
    Op.RECV_TIED_PARAM: ("P", None, 0),
    **{op: (op[1], 0, 0) for op in Op if len(op) == 2 and op[1] in "AKV"},
}
"""For each operation, the kind of its message, the source and the target. Source and target are
steps from the action's stage; None stands for the stage in the action's number, see PEERS."""


@dataclass(frozen=True, order=True)
class Action:
    """Stage `stage` does `op`; for the meaning of `number` see `Op`."""

    stage: int
    op: Op
    number: int = 0

    def __str__(self) -> str:
        if self.op in TIED_OPS:
            mini_batch, peer = divmod(self.number, PEERS)
            return f"{self.stage}{self.op.value}{peer}" + (f"@{mini_batch}" if mini_batch else "")
        number = "" if self.op in PER_MINI_BATCH and self.number == 0 else self.number
        return f"{self.stage}{self.op.value}{number}"

    @property
    def message(self) -> Message | None:
        """The message that the action sends or receives; None if it does neither."""
        ends = ENDS.get(self.op)
        if ends is None:
            return None
        kind, source, target = ends
        mini_batch, peer = divmod(self.number, PEERS)
        if source is None:
            return Message(peer, self.stage, kind, mini_batch)
        if target is None:
            return Message(self.stage, peer, kind, mini_batch)
        return Message(self.stage + source, self.stage + target, kind, self.number)

    def later(self, mini_batches: int, microbatches: int) -> Action:
        """Return the action for a mini-batch of `microbatches` that comes `mini_batches` later."""
        unit = microbatches
        if self.op in PER_MINI_BATCH:
            unit = 1
        elif self.op in TIED_OPS:
            unit = PEERS
        return replace(self, number=self.number + mini_batches * unit)

    @staticmethod
    def parse(text: str) -> Action:
        """Parse the text of an action. Raises `ScheduleError` for any other text."""
        match = re.fullmatch(r"([0-9]+)([A-Z]{1,2})([0-9]*)(?:@([0-9]+))?", text)
        ops = {op.value: op for op in Op}
        if match is None or match[2] not in ops:
            raise ScheduleError(
                f"{short(text)} is not an action; write stage, one of {' '.join(ops)}, number: 2F0"
            )
        op = ops[match[2]]
        if match[3] == "" and op not in PER_MINI_BATCH:
            raise ScheduleError(f"{text!r}: {op.value} takes a number: {match[1]}{op.value}0")
        _check_size(text, "stage", match[1], MOST_STAGE)
        if op in TIED_OPS:
            _check_size(text, "number", match[3], MOST_STAGE)
            _check_size(text, "mini-batch", match[4], MOST_NUMBER)
            return Action(int(match[1]), op, int(match[3]) + PEERS * int(match[4] or 0))
        if match[4] is not None:
            raise ScheduleError(
                f"{text!r}: only {words(op.value for op in TIED_OPS)} take a mini-batch after @"
            )
        _check_size(text, "number", match[3], MOST_NUMBER)
        return Action(int(match[1]), op, int(match[3] or 0))


def _check_size(text: str, part: str, digits: str | None, most: int) -> None:
    digits = digits or ""
    if len(digits) > len(str(most)) or int(digits or 0) > most:
        raise ScheduleError(f"{short(text)}: its {part} is {short(digits)}, above {most}")


FORWARDS = frozenset({Op.RECV_FORWARD, Op.FORWARD, Op.SEND_FORWARD})
"""The operations of a model that only predicts."""

Schedule = Sequence[tuple[Action, ...]]
"""The actions of each worker, in order. Worker n runs stage n if each worker has one stage.

A worker with several lanes (`hetpipe.schedule.lanes`) has several rows.
"""
