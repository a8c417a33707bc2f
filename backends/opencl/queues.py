"""Queues for passes: each runs its own passes in order, at the same time as the other queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .driver import driver

if TYPE_CHECKING:
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
        """The queue for kernel `number`, from 1, of dataflows.

        Dataflows of one pass follow one another, so their first kernels share a queue, and so on.
        """
        while len(self._beside) < number:
            profiling = driver().command_queue_properties.PROFILING_ENABLE
            self._beside.append(driver().CommandQueue(self._context, properties=profiling))
        return self._beside[number - 1]

    def flush(self) -> None:
        """Have everything begin that was enqueued."""
        for queue in (*self._beside, self.cl):
            queue.flush()

    def arena(self, nbytes: int, pool: MemoryPool) -> Piece:
        """Memory for intermediates. All graphs share it, since their launches run in order.

        One that is too small is dropped first; a graph that used it asks again when it runs.
        """
        if self._arena is None or self.arena_nbytes < nbytes:
            if self.last is not None:
                self.last.wait()
            self._arena = None
            self.arena_nbytes, self._arena = nbytes, pool.create(nbytes)
        return self._arena
