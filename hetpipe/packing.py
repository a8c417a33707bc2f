"""Turns objects into parts that travel between processes, and back, without copies of arrays."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple


class Packed(NamedTuple):
    """A pickled object: the pickle, then the bytes of large arrays."""

    parts: Sequence[Any]

    @property
    def nbytes(self) -> int:
        return sum(len(part) for part in self.parts)

    def unpack(self) -> Any:
        """Return the object. The bytes must come from a trusted process: they may run code."""
        return pickle.loads(self.parts[0], buffers=self.parts[1:])


def pack(message: Any) -> Packed:
    """Return an object as parts. A packed object is returned unchanged."""
    if isinstance(message, Packed):
        return message
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return Packed([memoryview(head), *(buffer.raw() for buffer in buffers)])
