"""A message in pieces: what a device finishes first leaves first (BaPipe, section 3.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hetpipe.capture.program import Slot
from hetpipe.sdk.backend import Buffer, Chunk, Event
from hetpipe.sdk.info import DeviceInfo, Execution
from hetpipe.wire.wire import Layout


class Piece(NamedTuple):
    """Elements lo..hi, in row-major order, of tensor number `tensor` of a message."""

    tensor: int
    buffer: Buffer
    lo: int
    hi: int
    ready: Event


Leaving = Callable[[Sequence[Slot], Sequence[Buffer], Event, Sequence[Chunk]], None]
"""Told of a pass that has begun: slots of its outputs, these, its end, and chunks."""


def streams(info: DeviceInfo) -> bool:
    """Whether the device tells of parts of its results while a pass runs."""
    return info.execution is Execution.ASYNC and info.capabilities.chunks


def pieces_of(
    layout: Layout,
    slots: Sequence[Slot],
    outputs: Sequence[Buffer],
    ended: Event,
    chunks: Sequence[Chunk],
) -> list[Piece] | None:
    """The whole message in its own order, out of a pass that has begun.

    What no chunk tells of is ready when the pass has `ended`. None if a tensor of the message is
    not among the outputs, whose slots are `slots`.
    """
    found = []
    at = {slot.key: index for index, slot in enumerate(slots)}
    for tensor, slot in enumerate(layout):
        if slot.key not in at:
            return None
        output = at[slot.key]
        count, reached = math.prod(slot.shape), 0
        told = sorted((lo, hi, ready) for index, lo, hi, ready in chunks if index == output)
        for lo, hi, ready in [*told, (count, count, ended)]:
            if lo > reached:
                found.append(Piece(tensor, outputs[output], reached, lo, ended))
            if hi > lo:
                found.append(Piece(tensor, outputs[output], lo, hi, ready))
            reached = hi
    return found
