"""Emulated speed: a compute action is stretched to the time of a slower device (station 7 of
docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import time


def stretch(start_s: float, speed: float) -> float:
    """Wait until an action that began at `start_s` has taken 1/speed of its time; returns the end.

    Times are those of `time.monotonic`.

    The core is kept awake: after an idle pause the next action would be slower by itself.
    """
    end_s = time.monotonic()
    deadline_s = start_s + (end_s - start_s) / speed
    while end_s < deadline_s:
        time.sleep(0)  # lets other threads of the worker run
        end_s = time.monotonic()
    return end_s


class Emulation:
    """The emulated speed of a worker, at most 1; it may change between two actions."""

    def __init__(self, speed: float) -> None:
        self.speed = speed

    def stretch(self, start_s: float) -> float:
        """Wait until an action that began at `start_s` has taken its time; returns the end."""
        return stretch(start_s, self.speed)
