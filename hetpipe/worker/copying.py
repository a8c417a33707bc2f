"""Copies a worker's values to the host: into memory that the controller has lent, or into pieces
that are sent while the worker continues."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from hetpipe.wire.copy_messages import Copied, Copy, Key, Lend, Stored
from hetpipe.wire.wire import Array
from hetpipe.worker.stage import Stage

PIECE_NBYTES = 4 << 20
"""The most bytes of a message, unless a single value has more."""


class Copying:
    """The memories in which a worker copies its values."""

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        """`fail` gets the errors of the threads that send."""
        self._fail = fail
        self._lent: dict[int, mmap.mmap] = {}
        self._own = np.empty(0, np.uint8)  # kept, since new memory costs more than a copy
        self._sender = threading.Thread()  # sends values that are in this memory

    def take(self, message: Lend, descriptor: int) -> None:
        """Use a lent memory for later copies."""
        self._lent[message.memory] = mmap.mmap(descriptor, 0)
        os.close(descriptor)

    def forget(self) -> None:
        """Use no memory any longer."""
        self._lent.clear()
        self._own = np.empty(0, np.uint8)

    def copy(
        self,
        asked: Copy,
        stages: Mapping[int, Stage],
        answer: Callable[[Any], None],
        send_beside: Callable[[Any], None],
    ) -> None:
        """Copy the values that a message asks for, now. If the memory is not lent, let a thread
        send them in pieces."""
        memory = self._memory(asked)
        values: dict[Key, Array] = {}
        for n, places in asked.places.items():
            for key, place in places.items():
                values[key] = stages[n].store.read_into(key, memory[place:])
        if asked.memory is not None:
            answer(Stored(asked.number, [*values]))
            return
        pieces = [Copied(asked.number, piece) for piece in _pieces(values)]
        args = pieces, send_beside, self._fail
        self._sender = threading.Thread(target=_send, args=args, name="copies", daemon=True)
        self._sender.start()

    def _memory(self, asked: Copy) -> Array:
        if asked.memory is not None:
            return np.frombuffer(self._lent[asked.memory], np.uint8)
        if len(self._own) < asked.nbytes or self._sender.is_alive():  # of an earlier copy
            self._own = np.empty(asked.nbytes, np.uint8)
        return self._own


def _send(
    pieces: list[Copied], send: Callable[[Any], None], fail: Callable[[BaseException], None]
) -> None:
    try:
        for piece in pieces:
            send(piece)
    except ConnectionError:  # the controller is gone, and the main thread notices
        pass
    except BaseException as error:
        fail(error)


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
