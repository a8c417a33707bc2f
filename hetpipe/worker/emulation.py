"""Emulated speed: a compute action is stretched to what a slower device would take."""

from __future__ import annotations

import time


def stretch(start_s: float, speed: float) -> float:
    """Wait until what began at `start_s` (`time.monotonic`) has taken 1/speed of its time; the end.

    The core is kept awake: after an idle pause the next action would be slower by itself.
    """
    end_s = time.monotonic()
    deadline_s = start_s + (end_s - start_s) / speed
    while end_s < deadline_s:
        time.sleep(0)  # lets other threads of the worker run
        end_s = time.monotonic()
    return end_s
