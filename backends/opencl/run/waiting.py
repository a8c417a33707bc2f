"""Threads that wait for commands, so that their callers can give up at a time limit."""

from __future__ import annotations

import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from ..platform.driver import driver

Job = tuple[Any, threading.Lock]
"""A command, and a lock that is held until the command has ended."""


class Waiters:
    """A pool of threads, which are kept: starting a thread takes longer than a small pass.

    A new thread starts if all others wait. A command that hangs keeps its thread until the process
    ends.
    """

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Job]] = []

    def ends(self, command: Any, timeout_s: float | None) -> bool:
        """Wait for a command; return whether it ended, failed or not, within the limit."""
        held = threading.Lock()
        held.acquire()
        try:
            jobs = self._idle.pop()
        except IndexError:
            jobs = SimpleQueue()
            threading.Thread(
                target=self._serve, args=(jobs,), name="hetpipe opencl wait", daemon=True
            ).start()
        jobs.put((command, held))
        return held.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))

    def _serve(self, jobs: SimpleQueue[Job]) -> None:
        while True:
            command, held = jobs.get()
            with suppress(driver().Error):  # the caller looks at the command's state
                command.wait()
            del command  # the driver's object must die on the thread that uses the queue
            self._idle.append(jobs)
            held.release()


WAITERS = Waiters()
