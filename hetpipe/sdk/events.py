"""Ready-made events, so that an asynchronous device need not define an event class.

| the end of the work shows as ...            | use           |
|---------------------------------------------|---------------|
| a call from your thread or the driver's     | `Signal`      |
| a readable file descriptor                  | `FdEvent`     |
| a flag that must be polled                  | `PolledEvent` |
| the return of an ordinary function          | `WorkQueue`   |
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Event

_POLL_S = (20e-6, 1e-3)  # first and longest pause between two polls


class Signal(Event):
    """An event that another thread ends. `doing` names the work in error messages."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        """End the event, once. If the work failed, `done` and `wait` raise `error`."""
        self._error = error
        self._ended.set()

    def done(self) -> bool:
        ended = self._ended.is_set()
        if ended and self._error is not None:
            raise _failure(self._doing, self._error)
        return ended

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._ended.wait(timeout_s):
            raise _late(self._doing, timeout_s)
        self.done()


class FdEvent(Event):
    """An event that has happened once a file descriptor is readable: a fence, a pipe, an eventfd.

    The event owns the descriptor, never reads from it, and closes it when Python frees the event.
    Pass `os.dup(fd)` to keep your descriptor. The event calls `check` once, after the end of the
    work; `check` raises if the work failed.
    """

    def __init__(self, fd: int, doing: str, check: Callable[[], None] = lambda: None) -> None:
        self._fd = fd
        self._doing = doing
        self._check = check
        self._outcome = Signal(doing)
        self._finishing = threading.Lock()  # so that only one thread calls `check`, and only once

    def __del__(self) -> None:
        os.close(self._fd)

    def done(self) -> bool:
        return self._outcome.done() or self._ends_within(0.0)

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._outcome.done() and not self._ends_within(timeout_s):
            raise _late(self._doing, timeout_s)

    def _ends_within(self, limit_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        if not poll.poll(None if limit_s is None else math.ceil(limit_s * 1e3)):
            return False
        with self._finishing:
            if not self._outcome.done():
                finish(self._outcome, self._check)
        return self._outcome.done()


class PolledEvent(Event):
    """An event that has happened once `poll()` is true; `poll` raises if the work failed.

    Any thread may call `poll`, until `poll` has returned true once. A wait pauses between two calls
    for 20 microseconds at first, and for a millisecond at most.
    """

    def __init__(self, poll: Callable[[], bool], doing: str) -> None:
        self._poll = poll
        self._doing = doing
        self._ended = False

    def done(self) -> bool:
        if not self._ended:
            try:
                self._ended = bool(self._poll())
            except Exception as error:
                raise _failure(self._doing, error) from error
        return self._ended

    def wait(self, timeout_s: float | None = None) -> None:
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        pause_s, longest_s = _POLL_S
        while not self.done():
            if time.monotonic() > end_s:
                raise _late(self._doing, timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


class WorkQueue:
    """A thread that calls functions one after another, with an event for each.

    Queues turn a driver's blocking calls into an asynchronous device; for example, one queue runs
    passes and another runs copies.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[tuple[Callable[[], None], Sequence[Event], Signal] | None] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], None], after: Sequence[Event] = (), doing: str = ""
    ) -> Event:
        """Call `work` when all earlier work of this queue and all of `after` have ended.

        Returns the event of the work's end. If an event in `after` fails, `work` is not called, and
        the returned event fails with the same error.
        """
        ended = Signal(doing or f"work of {self._name}")
        self._jobs.put((work, tuple(after), ended))
        return ended

    def close(self) -> None:
        """End the thread once all work has been done."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, after, ended = job

            def follow(work: Callable[[], None] = work, after: Sequence[Event] = after) -> None:
                for event in after:
                    event.wait()
                work()

            finish(ended, follow)
            del job, work, after, ended, follow  # frees the job's memory before the next job comes


def finish(outcome: Signal, work: Callable[[], None]) -> None:
    """Do the work and end its signal, with the error if there is one."""
    try:
        work()
    except BaseException as error:  # each waiter raises it, on its own thread
        outcome.end(error)
    else:
        outcome.end()


def _failure(doing: str, error: BaseException) -> BackendError:
    failure = BackendError(str(error) if isinstance(error, BackendError) else f"{doing}: {error}")
    failure.__cause__ = error
    return failure


def _late(doing: str, timeout_s: float | None) -> BackendError:
    return BackendError(f"{doing}: not done after {timeout_s} s")
