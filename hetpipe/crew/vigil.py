"""Judges whether a worker lives, by its messages and by the states of its threads."""

from __future__ import annotations

import time

from hetpipe.process import STOPPED_CHECKS, thread_states


class Vigil:
    """Watches one worker. Its owner calls `check` again and again.

    A thread that runs is a sign of life as well, since a long kernel may keep the interpreter's
    lock, and an overloaded machine lets a process wait.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard_s: float | None = None
        self._fresh = False  # whether a message has come since the last check
        self._stopped = self._resting = 0  # successive checks

    def hear(self) -> None:
        """Note a message."""
        self._heard_s, self._fresh = time.monotonic(), True

    def pause(self) -> None:
        """Give a worker that has begun more time, since this process was stopped as well."""
        if self._heard_s is not None:
            self.hear()

    def check(self, pid: int) -> str:
        """Return why the worker counts as lost, or ""."""
        if self._fresh:
            self._fresh, self._stopped, self._resting = False, 0, 0
            return ""
        states = thread_states(pid)
        self._stopped = self._stopped + 1 if "T" in states else 0
        self._resting = 0 if {*"RD"} & {*states} else self._resting + 1
        if self._stopped >= STOPPED_CHECKS:
            return f"is stopped, perhaps by the signal SIGSTOP (kill -CONT {pid} continues it)"
        silent_s = 0.0 if self._heard_s is None else time.monotonic() - self._heard_s
        if silent_s <= self._silence_s or self._resting < STOPPED_CHECKS:
            return ""
        limit_s = self._silence_s
        return (
            f"has given no sign of life for {silent_s:.0f} s (limit {limit_s:.0f} s): it is stuck"
        )
