"""The part of an opened device that its executables, events and buffers use."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from hetpipe.sdk.backend import Device, Event

from ..lower.launch import Kernel, Launch
from ..lower.target import Target
from .memory import MemoryPool, Piece
from .queues import PassQueue


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
    """Commands whose events are gone, until the thread that enqueues drops them."""
    enqueueing: threading.Lock
    """Held while a pass is enqueued: passes share an arena, so their launches must not mix."""
    dataflow_limit_s: float
    stuck: bool = False
    """Whether kernels of a dataflow hang."""

    @abstractmethod
    def pass_queue(self, number: int) -> PassQueue:
        """Return the queue of that number. Raises `BackendError` if there are fewer queues."""

    @abstractmethod
    def arena(self, nbytes: int, queue: PassQueue) -> Piece:
        """Return memory for the intermediates of passes in `queue`."""

    @abstractmethod
    def native(self, events: Sequence[Event]) -> list[Any] | None:
        """Return events of this device's queues, for a command to wait for; wait for others."""

    @abstractmethod
    def waits_long(self, command: Any) -> bool:
        """Return whether the driver's wait for `command` would also wait for later commands."""
