"""Emulates a slower device: it stretches a compute action to the slower device's time (station 7 of
docs/life-of-a-micro-batch.md).

A worker keeps its core awake while it waits, since the first action after an idle pause is slower.
Workers that share a core sleep instead, and count the time that each was on the core. If their
speeds sum to less than 1, none slows down another (both at 0.4; = computes, . waits for the core, -
sleeps):

    a  ====------====------
    b    ..====----   ..====----
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

AWAKE_S = 1e-4
"""The last part of a wait, for which no sleep is exact enough."""


class Moment(NamedTuple):
    """The begin of an action: by the clock, and by the process's time on cores."""

    clock_s: float
    cores_s: float

    @staticmethod
    def now() -> Moment:
        """Return the present moment."""
        return Moment(time.monotonic(), time.process_time())

    def later(self, seconds: float) -> Moment:
        """Return the moment after a wait that took no time on cores."""
        return self._replace(clock_s=self.clock_s + seconds)


@dataclass
class Emulation:
    """The emulated speed of a worker, at most 1; it may change between two actions."""

    speed: float
    shares_core: bool = False
    """Whether other workers compute on the worker's core."""

    def stretch(self, begin: Moment) -> float:
        """Wait until an action that began at this moment has taken its time; return the end."""
        return self.wait_until(begin.clock_s + self.lasts_s(begin))

    def lasts_s(self, begin: Moment) -> float:
        """Return the emulated duration of an action that began at this moment and ends now."""
        own_s = time.monotonic() - begin.clock_s
        if self.shares_core:
            own_s = min(own_s, time.process_time() - begin.cores_s)
        return own_s / self.speed

    def wait_until(self, deadline_s: float) -> float:
        """Wait, as a slower device would compute; return the end."""
        rest_s = deadline_s - time.monotonic()
        if self.shares_core and rest_s > AWAKE_S:
            time.sleep(rest_s - AWAKE_S)
        while (end_s := time.monotonic()) < deadline_s:
            time.sleep(0)  # lets other threads of the worker run
        return end_s


OWN_SPEED = Emulation(1.0)
