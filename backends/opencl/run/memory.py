"""Device memory that returns to a pool, so that repeated runs allocate nothing."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Buffer, Device

from ..platform.driver import driver, errors

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

PROBE_NBYTES = 4096
HUGE_PAGE_NBYTES = 2 << 20
MADV_HUGEPAGE = 14

GRANULE_NBYTES = 128
"""The memory of each tensor is a multiple of this: a vector of 16 may pass the tensor's end."""


def room_nbytes(nbytes: int) -> int:
    """Return the bytes that a tensor of `nbytes` takes in memory."""
    return max(1, -(-nbytes // GRANULE_NBYTES)) * GRANULE_NBYTES


class Piece:
    """A `cl.Buffer`, and its bytes in host memory if the device computes there."""

    __slots__ = ("_parts", "cl", "host")

    def __init__(self, cl: Any, host: Bytes | None) -> None:
        self.cl = cl
        self.host = host
        self._parts: dict[tuple[int, int], Any] = {}

    def part(self, begin: int, nbytes: int) -> Any:
        """Return the `cl.Buffer` of some bytes; the same bytes give the same object."""
        buffer = self._parts.get((begin, nbytes))
        if buffer is None:
            buffer = self._parts[begin, nbytes] = self.cl.get_sub_region(begin, nbytes)
        return buffer


class Memory:
    """A piece of device memory; it returns to its pool when its last tensor is deleted."""

    __slots__ = ("_pool", "nbytes", "piece")

    def __init__(self, piece: Piece, nbytes: int, pool: MemoryPool) -> None:
        self.piece = piece
        self.nbytes = nbytes
        self._pool = pool

    @property
    def cl(self) -> Any:
        return self.piece.cl

    @property
    def host(self) -> Bytes | None:
        """The same bytes in host memory, or None if the device does not compute there."""
        return self.piece.host

    def __del__(self) -> None:
        self._pool.give_back(self.piece, self.nbytes)


class Part(NamedTuple):
    """Bytes of a piece of memory, which lives as long as any of its parts."""

    whole: Memory
    begin: int
    nbytes: int

    @property
    def cl(self) -> Any:
        return self.whole.piece.part(self.begin, self.nbytes)

    @property
    def host(self) -> Bytes | None:
        host = self.whole.host
        return None if host is None else host[self.begin : self.begin + self.nbytes]


class OpenCLBuffer(Buffer):
    """A tensor in a piece of device memory."""

    def __init__(
        self, device: Device, shape: tuple[int, ...], dtype: str, memory: Memory | Part
    ) -> None:
        self.device = device
        self.shape = shape
        self.dtype = dtype
        self.memory = memory


class MemoryPool:
    """Free pieces by size, each with the last command of every queue when the piece came back."""

    def __init__(
        self,
        context: Any,
        device_id: str,
        host_queue: Any | None,
        last_events: Callable[[], tuple[Any, ...]],
        most_nbytes: int,
    ) -> None:
        """With `host_queue`, pieces are in host memory, and that queue maps each piece once.

        `most_nbytes` is the largest piece that the device allocates.
        """
        self._context = context
        self._device_id = device_id
        self._host_queue = host_queue
        self._last_events = last_events
        self._most_nbytes = most_nbytes
        self._free: dict[int, list[tuple[Piece, tuple[Any, ...]]]] = defaultdict(list)
        # Reentrant: garbage collection may give memory back while the lock is held.
        self._lock = threading.RLock()
        self.held_nbytes = 0

    def take(self, nbytes: int, queue: int | None = None) -> Memory:
        """Return memory for `nbytes` that no queue of passes uses, except perhaps `queue`.

        A pass may take memory that an earlier pass in the same queue still uses.
        """
        size = room_nbytes(nbytes)
        with self._lock:
            pieces = self._free[size]
            for at in range(len(pieces) - 1, -1, -1):
                if _complete(pieces[at][1], queue):
                    return Memory(pieces.pop(at)[0], size, self)
        piece = self.create(size)
        with self._lock:
            self.held_nbytes += size
        return Memory(piece, size, self)

    def create(self, nbytes: int) -> Piece:
        """Allocate memory; if there is no room, free unused pieces and try again.

        Raises `BackendError` beyond the device's limit for one piece. Some drivers would allocate
        such a piece, but kernels then compute wrong addresses in it.
        """
        if nbytes > self._most_nbytes:
            raise BackendError(
                f"{self._device_id} needs a piece of memory of {nbytes} bytes, but allocates at "
                f"most {self._most_nbytes} bytes at once (CL_DEVICE_MAX_MEM_ALLOC_SIZE): use "
                "smaller micro-batches, more stages, or recompute"
            )
        cl = driver()
        with errors(self._device_id, f"allocating {nbytes} bytes"):
            try:
                return allocate(self._context, nbytes, self._host_queue)
            except cl.MemoryError:
                self.trim()
                return allocate(self._context, nbytes, self._host_queue)

    def give_back(self, piece: Piece, size: int) -> None:
        """Return a piece to the pool, for the next `take`."""
        with self._lock:
            self._free[size].append((piece, self._last_events()))

    def trim(self) -> None:
        """Free every piece that no queue uses."""
        with self._lock:
            for size, pieces in self._free.items():
                busy = [piece for piece in pieces if not _complete(piece[1])]
                self.held_nbytes -= size * (len(pieces) - len(busy))
                pieces[:] = busy


def allocate(context: Any, nbytes: int, queue: Any | None) -> Piece:
    """Allocate a buffer of `nbytes`; with a queue, in host memory."""
    cl = driver()
    if queue is None:
        return Piece(cl.Buffer(context, cl.mem_flags.READ_WRITE, nbytes), None)
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.ALLOC_HOST_PTR, nbytes)
    flags = cl.map_flags.READ | cl.map_flags.WRITE
    mapped, _ = cl.enqueue_map_buffer(queue, buffer, flags, 0, (nbytes,), np.uint8)
    place = (ctypes.c_uint8 * nbytes).from_address(mapped.ctypes.data)
    _ask_for_huge_pages(mapped.ctypes.data, nbytes)
    mapped.base.release(queue)
    queue.finish()  # a kernel must not use a buffer that is still mapped
    return Piece(buffer, np.ctypeslib.as_array(place))


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Ask Linux for pages of 2 MiB, because a matrix spans too many pages of 4 KiB.

    The memory must be untouched. A system that ignores this hint is only slower.
    """
    begin = -(-address // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
    end = (address + nbytes) // HUGE_PAGE_NBYTES * HUGE_PAGE_NBYTES
    if sys.platform == "linux" and begin < end:
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE)


def computes_in_host(context: Any, queue: Any) -> bool:
    """Return whether kernels and the host see each other's writes without mapping a buffer again.

    Drivers for processors do this, but OpenCL does not promise it, so a probe decides.
    """
    cl = driver()
    piece = allocate(context, PROBE_NBYTES, queue)
    copied = np.zeros(PROBE_NBYTES, np.uint8)
    assert piece.host is not None
    cl.enqueue_fill_buffer(queue, piece.cl, np.uint8(0x5A), 0, PROBE_NBYTES)
    queue.finish()
    if not bool((piece.host == 0x5A).all()):
        return False
    piece.host[:] = 0xA5
    cl.enqueue_copy(queue, copied, piece.cl)
    return bool((copied == 0xA5).all())


def _complete(events: tuple[Any, ...], but: int | None = None) -> bool:
    complete = driver().command_execution_status.COMPLETE
    return all(
        event is None or queue == but or event.command_execution_status <= complete
        for queue, event in enumerate(events)
    )


class PassQueue:
    """An in-order queue, its last command, and the arena that its passes share."""

    def __init__(self, context: Any) -> None:
        cl = driver()
        profiling = cl.command_queue_properties.PROFILING_ENABLE
        self.cl = cl.CommandQueue(context, properties=profiling)
        self._context = context
        self._beside: list[Any] = []
        self.last: Any = None
        self.arena_nbytes = 0
        self._arena: Piece | None = None

    def beside(self, number: int) -> Any:
        """Return the queue for kernel `number` (from 1) of each dataflow.

        Dataflows of a pass run one after another, so kernels of the same number share a queue.
        """
        while len(self._beside) < number:
            profiling = driver().command_queue_properties.PROFILING_ENABLE
            self._beside.append(driver().CommandQueue(self._context, properties=profiling))
        return self._beside[number - 1]

    def flush(self) -> None:
        for queue in (*self._beside, self.cl):
            queue.flush()

    def arena(self, nbytes: int, pool: MemoryPool) -> Piece:
        """Return memory for intermediates; all graphs share it, because launches run in order.

        An arena that is too small is replaced. Each run of a graph asks for the arena again.
        """
        if self._arena is None or self.arena_nbytes < nbytes:
            if self.last is not None:
                self.last.wait()
            self._arena = None
            self.arena_nbytes, self._arena = nbytes, pool.create(nbytes)
        return self._arena
