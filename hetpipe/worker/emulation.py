"""Emulates a slower device: stretches each compute action to the time that the slower device would
take (station 7 of docs/life-of-a-micro-batch.md).

A worker keeps its core awake while it waits, since the first action after an idle pause is slower.
Workers that share a core sleep instead, and each stretches only its own time on the core. If their
speeds sum to less than 1, no worker slows down another. Below, both workers have speed 0.4
(= computes, . waits for the core, - sleeps):

    a  ====------====------
    b    ..====----   ..====----
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

AWAKE_S = 1e-4
"""Seconds at the end of a wait in which a worker stays awake, because a sleep is less exact."""


class Moment(NamedTuple):
    """The start of an action: the clock, and the seconds that the process has spent on cores."""

    clock_s: float
    cores_s: float

    @staticmethod
    def now() -> Moment:
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
        """Wait until an action that began at `begin` has its emulated duration; return the end."""
        return self.wait_until(begin.clock_s + self.lasts_s(begin))

    def lasts_s(self, begin: Moment) -> float:
        """Return the emulated duration of an action that began at `begin` and ends now."""
        own_s = time.monotonic() - begin.clock_s
        if self.shares_core:
            own_s = min(own_s, time.process_time() - begin.cores_s)
        return own_s / self.speed

    def wait_until(self, deadline_s: float) -> float:
        """Wait for the rest of an emulated action; return the end."""
        rest_s = deadline_s - time.monotonic()
        if self.shares_core and rest_s > AWAKE_S:
            time.sleep(rest_s - AWAKE_S)
        while (end_s := time.monotonic()) < deadline_s:
            time.sleep(0)  # lets other threads of the worker run
        return end_s


OWN_SPEED = Emulation(1.0)
