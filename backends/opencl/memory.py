"""Device memory that is given back to a pool, so that a steady state allocates nothing."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hetpipe.sdk.backend import Buffer

from .driver import driver, errors

if TYPE_CHECKING:
    from .device import OpenCLDevice

GRANULE_NBYTES = 128
"""Every tensor's room is a multiple of this, so that 16 lanes may pass its end."""


def room_nbytes(nbytes: int) -> int:
    """What a tensor of `nbytes` takes in memory."""
    return max(1, -(-nbytes // GRANULE_NBYTES)) * GRANULE_NBYTES


class Memory:
    """A piece of device memory; returns to its pool when the last tensor in it is gone."""

    __slots__ = ("_pool", "cl", "nbytes")

    def __init__(self, cl_buffer: Any, nbytes: int, pool: MemoryPool) -> None:
        self.cl = cl_buffer
        self.nbytes = nbytes
        self._pool = pool

    def __del__(self) -> None:
        self._pool.give_back(self.cl, self.nbytes)


class OpenCLBuffer(Buffer):
    """A tensor in a piece of device memory."""

    def __init__(
        self, device: OpenCLDevice, shape: tuple[int, ...], dtype: str, memory: Memory
    ) -> None:
        self.device = device
        self.shape = shape
        self.dtype = dtype
        self.memory = memory


class MemoryPool:
    """Free pieces by size, each with the event after which nothing uses it."""

    def __init__(self, context: Any, device_id: str, last_event: Callable[[], Any]) -> None:
        self._context = context
        self._device_id = device_id
        self._last_event = last_event
        self._free: dict[int, list[tuple[Any, Any]]] = defaultdict(list)
        # Reentrant: a collection of garbage inside may give memory back.
        self._lock = threading.RLock()
        self.held_nbytes = 0

    def take(self, nbytes: int, idle: bool) -> Memory:
        """Memory for `nbytes`. `idle`: the compute queue must be done with it.

        A pass, which runs in the queue, may take what an earlier pass in the queue still uses.
        """
        size = room_nbytes(nbytes)
        with self._lock:
            pieces = self._free[size]
            for at in range(len(pieces) - 1, -1, -1):
                if not idle or _complete(pieces[at][1]):
                    return Memory(pieces.pop(at)[0], size, self)
            self.held_nbytes += size
        return Memory(self.create(size), size, self)

    def create(self, nbytes: int) -> Any:
        """A new `cl.Buffer`; frees what is unused and tries again if there is no room."""
        cl = driver()
        with errors(self._device_id, f"allocating {nbytes} bytes"):
            try:
                return cl.Buffer(self._context, cl.mem_flags.READ_WRITE, nbytes)
            except cl.MemoryError:
                self.trim()
                return cl.Buffer(self._context, cl.mem_flags.READ_WRITE, nbytes)

    def give_back(self, cl_buffer: Any, size: int) -> None:
        """Keep a piece for the next who asks."""
        with self._lock:
            self._free[size].append((cl_buffer, self._last_event()))

    def trim(self) -> None:
        """Free every piece that nothing uses."""
        with self._lock:
            for size, pieces in self._free.items():
                busy = [piece for piece in pieces if not _complete(piece[1])]
                self.held_nbytes -= size * (len(pieces) - len(busy))
                pieces[:] = busy


def _complete(event: Any) -> bool:
    cl = driver()
    return event is None or event.command_execution_status <= cl.command_execution_status.COMPLETE
