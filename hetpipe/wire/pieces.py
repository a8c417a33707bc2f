"""Sends a message in pieces, each as soon as the device has finished it (BaPipe, section 3.2;
station 8 of docs/life-of-a-micro-batch.md)."""

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
"""(slots of the outputs, outputs, end of the pass, chunks); called when a pass has begun."""


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

    Elements in no chunk are ready when the pass has `ended`. `slots` belong to the outputs. The
    result is None if one of the message's tensors is no output.
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
