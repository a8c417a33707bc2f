"""Queues for passes: each runs its own passes in order, at the same time as the other queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .driver import driver

if TYPE_CHECKING:
    from .memory import MemoryPool


class PassQueue:
    """An in-order queue, its last command, and the arena that its passes share."""

    def __init__(self, context: Any) -> None:
        cl = driver()
        profiling = cl.command_queue_properties.PROFILING_ENABLE
        self.cl = cl.CommandQueue(context, properties=profiling)
        self.last: Any = None
        self.arena_nbytes = 0
        self._arena: Any = None

    def arena(self, nbytes: int, pool: MemoryPool) -> Any:
        """Memory for intermediates. All graphs share it, since their launches run in order."""
        if self.arena_nbytes < nbytes:
            self.arena_nbytes, self._arena = nbytes, pool.create(nbytes).cl
        return self._arena
