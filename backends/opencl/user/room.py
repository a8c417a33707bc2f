"""Memory of arrays that are arguments of kernels that run alone, with guards around it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np

from hetpipe.sdk.kernels import Array, Flaw

GUARD = 0xFF
"""Value of each byte in a guard; floats of these bytes are NaN."""


class Memory(Protocol):
    """Makes and reads buffers of a device."""

    def buffer(self, nbytes: int, content: Array, is_input: bool) -> tuple[Any, Any, int]: ...
    def read(self, buffer: Any, nbytes: int) -> Array: ...


class Room:
    """Memory of one array."""

    def __init__(self, opened: Memory, array: Array, is_input: bool) -> None:
        self._opened, self._array = opened, array
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._nbytes = array.nbytes
        self._whole, self.part, self._guard = opened.buffer(array.nbytes, content, is_input)

    @cached_property
    def _content(self) -> Array:
        return self._opened.read(self._whole, self._nbytes + 2 * self._guard)

    def array(self) -> Array:
        inside = self._content[self._guard : self._guard + self._nbytes]
        return inside.view(self._array.dtype).reshape(self._array.shape).copy()

    def damage(self, name: str, function: str) -> Flaw | None:
        """Return a flaw for the first guard that the kernel has written to, or None."""
        sides = (("before its beginning", 0), ("after its end", self._guard + self._nbytes))
        for side, lo in sides:
            hurt = np.flatnonzero(self._content[lo : lo + self._guard] != GUARD)
            if hurt.size:
                first = int(hurt[0]) if lo else self._guard - int(hurt[-1])
                text = f"writes beyond {name}, {first} bytes {side} ({self._nbytes} bytes)"
                return Flaw("out of bounds", function, text)
        return None
