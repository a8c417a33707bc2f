"""Queues for passes: a queue runs its passes in order, in parallel with other queues."""

from __future__ import annotations

from typing import Any

from ..platform.driver import driver
from .memory import MemoryPool, Piece


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

        Dataflows of a pass run one after another, so their kernels of the same number share one.
        """
        while len(self._beside) < number:
            profiling = driver().command_queue_properties.PROFILING_ENABLE
            self._beside.append(driver().CommandQueue(self._context, properties=profiling))
        return self._beside[number - 1]

    def flush(self) -> None:
        """Start all enqueued commands."""
        for queue in (*self._beside, self.cl):
            queue.flush()

    def arena(self, nbytes: int, pool: MemoryPool) -> Piece:
        """Return memory for intermediates; all graphs share it, since launches run in order.

        An arena that is too small is replaced: graphs that used it ask for it again in each run.
        """
        if self._arena is None or self.arena_nbytes < nbytes:
            if self.last is not None:
                self.last.wait()
            self._arena = None
            self.arena_nbytes, self._arena = nbytes, pool.create(nbytes)
        return self._arena
