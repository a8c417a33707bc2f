"""Judges whether a worker lives, by its messages and by the states of its threads."""

from __future__ import annotations

from hetpipe.process import LOOK_S, STOPPED_LOOKS, is_stopped, thread_states


class Vigil:
    """Watches one worker. Its owner calls `look` each `LOOK_S`.

    A thread that runs is a sign of life as well, since a long kernel may keep the interpreter's
    lock, and an overloaded machine lets a process wait; so is a thread that a debugger holds. Looks
    are counted, so time in which the owner is stopped, or the machine sleeps, does not count.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._begun = self._fresh = False  # whether a message has come; since the last look
        self._stopped = self._silent = 0  # successive looks

    def hear(self) -> None:
        """Note a message."""
        self._begun = self._fresh = True

    def look(self, pid: int) -> str:
        """Return why the worker counts as lost, or ""."""
        if self._fresh:
            self._fresh, self._stopped, self._silent = False, 0, 0
            return ""
        self._stopped = self._stopped + 1 if is_stopped(pid) else 0
        if self._stopped >= STOPPED_LOOKS:
            return f"is stopped, perhaps by the signal SIGSTOP (kill -CONT {pid} continues it)"
        self._silent += self._begun
        silent_s = self._silent * LOOK_S
        if silent_s > self._silence_s / 2 and {*"RDt"} & {*thread_states(pid)}:
            self._silent = 0
        elif silent_s > self._silence_s:
            return f"has given no sign of life for {self._silence_s:.0f} s: it is stuck"
        return ""
