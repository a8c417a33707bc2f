"""Wires: the messages between two replicas, their layout in memory, and pieces of messages that
leave as soon as the device has finished them (BaPipe, section 3.2; station 8 of
docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from hetpipe.capture.program import Program, Slot, StageGraphs
from hetpipe.errors import HetpipeError
from hetpipe.sdk.backend import Buffer, Chunk, Event
from hetpipe.sdk.info import DeviceInfo, Execution
from hetpipe.wire.channel import ALIGN, aligned
from hetpipe.wire.shares import Replica

Array = np.ndarray[Any, Any]
Layout = tuple[Slot, ...]


class Content(str, Enum):
    """The content of a message. The first five values are the letters of a schedule's messages."""

    FORWARD = "F"
    BACKWARD = "B"
    ALL_REDUCE = "A"
    TIED_GRAD = "G"
    TIED_PARAM = "P"
    EVALUATION = "E"  # a forward, in evaluation
    INFERENCE = "O"  # a forward that returns only the model's output
    FORWARD_ROWS = "f"  # some rows of a whole message, see `hetpipe.wire.row_messages`
    BACKWARD_ROWS = "b"
    EVALUATION_ROWS = "e"
    INFERENCE_ROWS = "o"
    SUM_IN_FORWARD = "sF"  # an exchange within a pass, see `hetpipe.worker.divided`
    SUM_IN_BACKWARD = "sB"
    SUM_IN_BACKWARD_INPUT = "sI"
    SUM_IN_BACKWARD_WEIGHT = "sW"
    SUM_IN_EVALUATION = "sE"
    SUM_IN_INFERENCE = "sO"

    def __init__(self, letters: str) -> None:
        self.has_some_rows = letters.islower()  # of a whole message
        self.is_tied = letters in "GP"
        self.stays_on_host = letters not in "FBEO"
        """Whether the host sums, joins or replaces the message's tensors."""

    @property
    def some_rows(self) -> Content:
        """The content of a message with only some rows of a message of this content."""
        return Content(self.value.lower())

    @staticmethod
    def sum_in(letter: str) -> Content:
        """Return the content of an exchange within a pass; `letter` is the pass's operation."""
        return Content(f"s{letter}")


IN_EVAL = (Content.EVALUATION, Content.INFERENCE)
"""The contents of forwards in eval mode."""


def forwards_of(stage: StageGraphs, content: Content) -> Mapping[int, Program]:
    """Return a stage's forwards in eval mode, by number of samples; see `IN_EVAL`."""
    return stage.evaluation if content is Content.EVALUATION else stage.inference


class Kind(NamedTuple):
    """The kind of a message; messages of one kind have one layout.

    `number` is the count of the micro-batch's samples, or of the message's rows. For an exchange
    within a pass it is the number of the exchange. For a stage's gradients and for tied tensors it
    is 0.
    """

    content: Content
    number: int


GRADIENTS = Kind(Content.ALL_REDUCE, 0)
"""All gradients of a stage."""

Axes = Mapping[str, int]
"""The dimension of each tensor's rows, by name."""


@dataclass(frozen=True)
class Wire:
    """The messages from one replica to another: the layout of each kind.

    `axes` covers the tensors that travel by rows, on this or another wire between the same stages.
    """

    source: Replica
    target: Replica
    layouts: dict[Kind, Layout]
    axes: Axes = field(default_factory=dict)

    @property
    def packed_nbytes(self) -> int:
        """Bytes of memory that the largest message needs."""
        return max(packed_nbytes(layout) for layout in self.layouts.values())


def host_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy type in which a tensor is uploaded, downloaded and sent."""
    if name == "bfloat16":
        raise HetpipeError(
            "a bfloat16 tensor would leave its device, but on the host tensors are numpy arrays, "
            "and numpy has no bfloat16; cast to float32 or float16 at the cut, or cut elsewhere"
        )
    return np.dtype(name)


@lru_cache(maxsize=256)
def offsets(layout: Layout) -> tuple[int, ...]:
    """Return the byte offsets of a message's tensors, and of the message's end.

    The message begins with its time of delivery, in the first `ALIGN` bytes.
    """
    begins, offset = [], ALIGN
    for slot in layout:
        begins.append(offset)
        offset = aligned(offset + slot.nbytes)
    return (*begins, offset)


def packed_nbytes(layout: Layout) -> int:
    return offsets(layout)[-1]


def arrays_in(memory: Any, layout: Layout, base: int = 0) -> list[Array]:
    """Return the tensors of a message as arrays over `memory`, starting at byte `base`."""
    return [
        np.ndarray(slot.shape, host_dtype(slot.dtype), memory, base + offset)
        for slot, offset in zip(layout, offsets(layout), strict=False)
    ]


class Piece(NamedTuple):
    """Elements lo..hi, in row-major order, of tensor number `tensor` of a message."""

    tensor: int
    buffer: Buffer
    lo: int
    hi: int
    ready: Event


Leaving = Callable[[Sequence[Slot], Sequence[Buffer], Event, Sequence[Chunk]], None]
"""Called when a pass has begun, with the slots of its outputs, the outputs, the event of its end
and its chunks."""


def streams(info: DeviceInfo) -> bool:
    """Return whether the device reports parts of its results while a pass runs."""
    return info.execution is Execution.ASYNC and info.capabilities.chunks


def pieces_of(
    layout: Layout,
    slots: Sequence[Slot],
    outputs: Sequence[Buffer],
    ended: Event,
    chunks: Sequence[Chunk],
) -> list[Piece] | None:
    """Return the pieces of a message in order, made from a pass that has begun.

    Elements that belong to no chunk are ready when the pass has `ended`. `slots` belong to the
    outputs. Return None if a tensor of the message is not an output of the pass.
    """
    pieces = []
    at = {slot.key: index for index, slot in enumerate(slots)}
    for tensor, slot in enumerate(layout):
        if slot.key not in at:
            return None
        output = at[slot.key]
        count, reached = math.prod(slot.shape), 0
        ready_parts = sorted((lo, hi, ready) for index, lo, hi, ready in chunks if index == output)
        for lo, hi, ready in [*ready_parts, (count, count, ended)]:
            if lo > reached:
                pieces.append(Piece(tensor, outputs[output], reached, lo, ended))
            if hi > lo:
                pieces.append(Piece(tensor, outputs[output], lo, hi, ready))
            reached = hi
    return pieces
