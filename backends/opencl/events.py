"""Events: ends of commands on a device, and of transfers that wait for other devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Event

from .driver import driver, errors

if TYPE_CHECKING:
    from .device import OpenCLDevice
    from .outside import Outcome


class CommandEvent(Event):
    """The end of a command in one of a device's queues."""

    def __init__(self, device: OpenCLDevice, command: Any, doing: str) -> None:
        self.device = device
        self.command = command
        self.doing = doing

    def __del__(self) -> None:
        # The driver's object must die on the thread that uses the queue.
        self.device.retired.append(self.command)

    def done(self) -> bool:
        with errors(self.device.info.id, self.doing):
            status = self.command.command_execution_status
        if status < 0:
            raise BackendError(f"{self.device.info.id} failed while {self.doing}: status {status}")
        return bool(status == driver().command_execution_status.COMPLETE)

    def on_done(self, fn: Callable[[], None]) -> None:
        cl = driver()
        if self.command.command_execution_status <= cl.command_execution_status.COMPLETE:
            fn()
            return
        with errors(self.device.info.id, self.doing):
            self.command.set_callback(cl.command_execution_status.COMPLETE, lambda status: fn())

    def wait(self, timeout_s: float | None = None) -> None:
        if self.done():
            return
        if timeout_s is None and not self.device.waits_long(self.command):
            with errors(self.device.info.id, self.doing):
                self.command.wait()
        else:
            ended = threading.Event()
            self.on_done(ended.set)
            if not ended.wait(timeout_s):
                raise BackendError(
                    f"{self.device.info.id} is still {self.doing} after {timeout_s} s"
                )
        self.done()

    @property
    def span_s(self) -> tuple[float, float] | None:
        with errors(self.device.info.id, self.doing):
            profile = self.command.profile
            return profile.start * 1e-9, profile.end * 1e-9


class PassEvent(CommandEvent):
    """The end of a pass, which fails if it met an index out of range."""

    def __init__(
        self, device: OpenCLDevice, command: Any, doing: str, outcomes: Sequence[Outcome]
    ) -> None:
        super().__init__(device, command, doing)
        self._outcomes = outcomes

    def done(self) -> bool:
        ended = super().done()
        if ended:
            for outcome in self._outcomes:
                outcome.check(self.device.info.id)
            self._outcomes = ()  # frees their memory
        return ended


class LaterEvent(Event):
    """The end of work that starts when other events have ended."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._waiting: list[Callable[[], None]] = []
        self._error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        """It has ended."""
        with self._lock:
            self._error = error
            self._ended.set()
            waiting, self._waiting = self._waiting, []
        for fn in waiting:
            fn()

    def done(self) -> bool:
        ended = self._ended.is_set()
        if self._error is not None:
            raise BackendError(f"{self._doing} failed: {self._error}") from self._error
        return ended

    def on_done(self, fn: Callable[[], None]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._waiting.append(fn)
                return
        fn()

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._ended.wait(timeout_s):
            raise BackendError(f"{self._doing} has not ended after {timeout_s} s")
        self.done()


def when_done(events: Sequence[Event], fn: Callable[[], None]) -> None:
    """Call `fn` once when all of `events` have ended; possibly on a thread of a driver."""
    left = len(events)
    lock = threading.Lock()

    def one() -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            fn()

    for event in events:
        event.on_done(one)
