"""Guard: checks every public call of a pipeline, and delays interrupts to the end of the call."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hetpipe.errors import HetpipeError
from hetpipe.hosts.uninterrupted import Holder, is_held

HELD = (signal.SIGINT, signal.SIGTERM)
"""Signals that wait for the end of a call, if their handlers are Python functions."""


class Guard:
    """`with guard("step"):` surrounds a public call.

    A call in a forked process raises an error, and so does a call while another thread is in a
    call. An interrupt (Ctrl-C, a notebook's stop button) waits until the outermost call has ended,
    so every mini-batch is trained completely or not at all. A second interrupt aborts the call:
    `abort(call)` then closes the pipeline, and returns the message for all later calls.
    """

    def __init__(self, abort: Callable[[str], str]) -> None:
        self._abort = abort
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a thread may make a call within a call
        self._closed = ""  # the reason, after a second interrupt
        self._held: _HeldSignals | None = None  # of the outermost call, if it holds signals
        self.checks: list[Callable[[str], None]] = []
        """Functions that get the name of a call, and raise `HetpipeError` if it must not begin."""

    @contextmanager
    def __call__(self, call: str, alone: bool = True) -> Iterator[None]:
        """Surround the call of this name. Raises `HetpipeError` if it must not begin.

        A call that is not `alone` may begin while another thread is in a call.
        """
        if not self.owns:
            raise HetpipeError(
                f"{call}() in process {os.getpid()}, a fork of process {self._owner}, which made "
                "this pipeline: its workers answer that process alone; make another pipeline here"
            )
        held = _HeldSignals()
        held.hold()
        if held.holds:
            self._held = held
        try:
            if alone and not self._lock.acquire(blocking=False):
                raise HetpipeError(
                    f"{call}() on thread {threading.current_thread().name!r} while another thread "
                    "is in a call of this pipeline: use a pipeline on one thread at a time"
                )
            try:
                if self._closed:
                    raise HetpipeError(self._closed)
                for check in self.checks:
                    check(call)
                yield
            finally:
                if alone:
                    self._lock.release()
        except BaseException as error:
            if held.broken:
                self._closed = "a second interrupt is closing this pipeline"
                self._closed = self._abort(call)
                if not error.args:
                    error.args = (self._closed,)
            raise
        finally:
            if held.holds:
                self._held = None
            held.release()

    def deliver(self) -> None:
        """Run the handler of a signal that waits for the end of the outermost call, now."""
        if self._held is not None:
            self._held.deliver()

    @property
    def owns(self) -> bool:
        """Whether this process made the pipeline; False in a fork of that process."""
        return os.getpid() == self._owner


class _HeldSignals(Holder):
    """Holds the signals that arrive during a call, and runs their handlers when the call has ended.

    Only the main thread can hold signals, and only there can a handler raise an error. A call
    within a call holds no signals, because the outer call holds them.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._waiting: int | None = None
        self._ends = False
        self.broken = False
        """Whether the handler of a second signal has raised."""

    def hold(self) -> None:
        """Begin to hold signals; hold none if a handler raises an error meanwhile."""
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in HELD:
                handler = signal.getsignal(number)
                if callable(handler) and not is_held(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._arrived)
        except BaseException:
            self.release()
            raise

    @property
    def holds(self) -> bool:
        """Whether signals are held."""
        return bool(self._handlers)

    def deliver(self) -> None:
        """Run the handler of the waiting signal, if there is one."""
        if (number := self._waiting) is not None:
            self._waiting = None
            self._handlers[number](number, sys._getframe())

    def release(self) -> None:
        """Restore the handlers, and run the handler of the waiting signal."""
        self._ends = True
        for number, handler in reversed(self._handlers.items()):
            signal.signal(number, handler)
        if not self.broken:
            self.deliver()

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._waiting is None or self._ends:
            self._waiting = number
            return
        self.broken = True
        self._handlers[number](number, frame)
        self.broken = False
