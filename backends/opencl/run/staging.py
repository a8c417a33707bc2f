"""Pinned host memory through which the copies of a card pass.

A driver copies pageable memory through a small pinned buffer, and the thread that asks for the copy
waits. From memory that is pinned already, the card copies while the thread does other work.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import numpy as np

from ..platform.driver import driver, errors
from .memory import Bytes

SMALLEST_NBYTES = 1 << 12
LARGEST_NBYTES = 1 << 26
"""The most bytes of a copy through pinned memory; a larger copy is left to the driver."""
MOST_NBYTES = 1 << 28
"""The most pinned memory of a device: the system cannot use it for anything else."""


class Pinned:
    """A piece of pinned memory; it returns to its pool when its last reference is deleted."""

    __slots__ = ("_pool", "_whole")

    def __init__(self, whole: Any, pool: Staging) -> None:
        self._whole = whole
        self._pool = pool

    def bytes(self, nbytes: int) -> Bytes:
        """Return the first bytes."""
        first: Bytes = self._whole[:nbytes]
        return first

    def __del__(self) -> None:
        self._pool.give_back(self._whole)


class Staging:
    """Pieces of pinned memory by size, each mapped once and used again."""

    def __init__(self, context: Any, device_id: str, queue: Any) -> None:
        self._context = context
        self._device_id = device_id
        self._queue = queue
        self._free: dict[int, list[Any]] = defaultdict(list)
        # Reentrant: garbage collection may give memory back while the lock is held.
        self._lock = threading.RLock()
        self.held_nbytes = 0

    def take(self, nbytes: int) -> Pinned | None:
        """Return memory for `nbytes`, or None if a copy of this size should not use any."""
        size = max(SMALLEST_NBYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            if self._free[size]:
                return Pinned(self._free[size].pop(), self)
            if size > LARGEST_NBYTES or self.held_nbytes + size > MOST_NBYTES:
                return None
            self.held_nbytes += size
            return Pinned(self._mapped(size), self)

    def give_back(self, whole: Any) -> None:
        """Return a piece to the pool, for the next `take`."""
        with self._lock:
            self._free[len(whole)].append(whole)

    def trim(self) -> None:
        """Free every piece that no copy uses."""
        with self._lock, errors(self._device_id, "freeing pinned memory"):
            for size, pieces in self._free.items():
                self.held_nbytes -= size * len(pieces)
                for whole in pieces:
                    whole.base.release(self._queue)
                pieces.clear()

    def _mapped(self, nbytes: int) -> Any:
        """Return the bytes of a new buffer, which stays mapped as long as they exist."""
        cl = driver()
        with errors(self._device_id, f"pinning {nbytes} bytes"):
            flags = cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR
            buffer = cl.Buffer(self._context, flags, nbytes)
            both = cl.map_flags.READ | cl.map_flags.WRITE
            whole, _ = cl.enqueue_map_buffer(self._queue, buffer, both, 0, (nbytes,), np.uint8)
            return whole
