"""Copies a worker's values to the host, and sends them while the worker goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hetpipe.wire.copy_messages import Copied, Copy
from hetpipe.wire.messages import Array
from hetpipe.worker.bind import Key
from hetpipe.worker.stage import Stage

PIECE_NBYTES = 4 << 20
"""The most bytes of a message, unless a single value has more."""


def copy_stages(asked: Copy, stages: Mapping[int, Stage], send: Callable[[Any], None]) -> None:
    """Copy the values that a message asks for, now, and let a thread `send` them in pieces."""
    values = {key: stages[n].get(key) for n, keys in asked.values.items() for key in keys}
    pieces = [Copied(asked.number, piece) for piece in _pieces(values)]
    args = pieces, send
    threading.Thread(target=_send, args=args, name="copies", daemon=True).start()


def _send(pieces: list[Copied], send: Callable[[Any], None]) -> None:
    for piece in pieces:
        try:
            send(piece)
        except OSError:  # the controller is gone, and the main thread notices
            return


def _pieces(values: Mapping[Key, Array]) -> Iterator[dict[Key, Array]]:
    """Yield the values in pieces of at most `PIECE_NBYTES`."""
    piece: dict[Key, Array] = {}
    sum_nbytes = 0
    for key, value in values.items():
        if piece and sum_nbytes + value.nbytes > PIECE_NBYTES:
            yield piece
            piece, sum_nbytes = {}, 0
        piece[key] = value
        sum_nbytes += value.nbytes
    if piece:
        yield piece
