"""The part of an opened device that its executables, events and buffers use, and two probes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Device

from ..lower.launch import Kernel, Launch
from ..lower.target import Target
from ..platform.driver import driver
from .memory import MemoryPool, PassQueue, Piece

CHAINS, LANES = 12, 16
"""Independent chains of multiply-adds in a work-item, and their vector width; the values of
`kernels/cpu/ceiling.cl`."""
WORK_ITEMS, REPEATS = 32, 40_000
LAUNCHES = 200


class KernelSource(Protocol):
    """Builds programs, or loads them from a bundle."""

    def prepare(self, kernels: Iterable[Kernel], launches: Sequence[Launch] = ()) -> None:
        """Make the programs of these kernels ready. Raises `BackendError`."""

    def kernel(self, kernel: Kernel) -> Any:
        """Return a new `cl.Kernel` of a program that is ready."""


class OpenedDevice(Device):
    """An opened device as its executables and events use it."""

    target: Target
    context: Any
    queue: Any
    """The first queue of passes."""
    memory: MemoryPool
    programs: KernelSource
    retired: deque[Any]
    """Commands whose events are gone; the thread that enqueues passes drops these commands."""
    enqueueing: threading.Lock
    """Held while a pass is enqueued: passes that share an arena must not mix their launches."""
    pass_queues: tuple[PassQueue, ...]
    lock: threading.RLock
    """Held while an arena is replaced or transfers are enqueued."""
    drains: bool
    """Whether the driver's wait for an event waits for its whole queue."""
    spins: bool
    """Whether the driver's wait for an event keeps a core busy, which other workers need."""
    dataflow_limit_s: float
    stuck: bool = False
    """Whether kernels of a dataflow hang."""

    def waits_long(self, command: Any) -> bool:
        """Return whether the driver's wait for `command` would also wait for later commands."""
        if not self.drains:
            return False
        behind = (q for q in self.pass_queues if q.last is not None and q.last is not command)
        return any(command.command_queue == queue.cl for queue in behind)

    def pass_queue(self, number: int) -> PassQueue:
        """Return queue `number` of the passes. Raises `BackendError` if there is none."""
        if number >= len(self.pass_queues):
            raise BackendError(
                f"{self.info.id} runs {len(self.pass_queues)} passes at once, so it has no queue "
                f"{number}"
            )
        return self.pass_queues[number]

    def arena(self, nbytes: int, queue: PassQueue) -> Piece:
        """Return memory for the intermediates of passes in `queue`."""
        with self.lock:
            return queue.arena(nbytes, self.memory)

    def fma_ceiling(self) -> tuple[Callable[[], None], int] | None:
        """Return (run, operations): `run` does `operations` float32 operations in registers."""
        cl, queue, kernel = driver(), self.queue, self._probe("fma_ceiling")
        out = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, WORK_ITEMS * LANES * 4)

        def run() -> None:
            # Set here, because `run` then keeps `out` alive.
            kernel.set_args(out, np.int32(REPEATS))
            cl.enqueue_nd_range_kernel(queue, kernel, (WORK_ITEMS,), (1,))
            queue.finish()

        return run, 2 * WORK_ITEMS * REPEATS * CHAINS * LANES

    def launch_floor(self) -> tuple[Callable[[], None], int] | None:
        """Return (run, launches): `run` enqueues `launches` empty kernels of one work-item."""
        cl, queue, kernel = driver(), self.queue, self._probe("nothing")

        def run() -> None:
            for _ in range(LAUNCHES):
                cl.enqueue_nd_range_kernel(queue, kernel, (1,), (1,))
            queue.finish()

        return run, LAUNCHES

    def _probe(self, name: str) -> Any:
        kernel = Kernel.of_files(name, ("cpu/common.cl", "cpu/ceiling.cl"))
        self.programs.prepare([kernel])
        return self.programs.kernel(kernel)
