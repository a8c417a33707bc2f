"""Credible times: a pass takes more than 0 s and at most ten minutes.

A clock may stop, go back, or jump by an hour when a machine sleeps, and a device may report
nonsense. Costs come only from credible times. If most times are not credible, that is an error.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hetpipe.errors import CostError
from hetpipe.worker.emulation import Emulation, Moment

LONGEST_S = 600.0


class ClockWarning(UserWarning):
    """Some times were not credible; costs come from the other times."""


def now_s() -> float:
    """Return the time, in seconds, of the clock that all measurements in a worker use."""
    return time.monotonic()


def begin() -> Moment:
    """Return the moment at which a measurement begins."""
    return Moment.now()._replace(clock_s=now_s())


def since_s(begin: Moment, emulation: Emulation) -> float:
    """Return the seconds since `begin`; if credible, they are stretched to the emulated speed."""
    time_s = now_s() - begin.clock_s
    return emulation.lasts_s(begin) if emulation.speed < 1 and credible(time_s) else time_s


def catch_up(begin: Moment, lasts_s: float, emulation: Emulation) -> None:
    """Wait until `lasts_s` after `begin`, if the speed is emulated and `lasts_s` is credible."""
    if emulation.speed < 1 and credible(lasts_s):
        emulation.wait_until(begin.clock_s + lasts_s)


def credible(time_s: float) -> bool:
    """Return whether a pass may have taken this time; NaN is not credible."""
    return 0.0 < time_s <= LONGEST_S


@dataclass
class Samples:
    """Seconds of repeated measurements: credible ones (`good`), and all others (`bad`)."""

    good: list[float] = field(default_factory=list)
    bad: list[float] = field(default_factory=list)

    @staticmethod
    def of(times_s: Iterable[float]) -> Samples:
        samples = Samples()
        samples.extend(times_s)
        return samples

    def extend(self, times_s: Iterable[float]) -> None:
        for time_s in times_s:
            (self.good if credible(time_s) else self.bad).append(time_s)

    def check(self, subject: str) -> None:
        """Raise `CostError` if most of the times are not credible."""
        if len(self.bad) > len(self.good):
            raise CostError(
                f"{subject} took {self.bad[-1]} s, in {len(self.bad)} of "
                f"{len(self.bad) + len(self.good)} measurements; a pass takes more than 0 s and at "
                f"most {LONGEST_S:.0f} s: check the clock of this machine, or leave the device out"
            )

    @property
    def median_s(self) -> float:
        return statistics.median(self.good)

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.good)

    @property
    def spread(self) -> float:
        return spread_of(self.good)

    @property
    def error_s(self) -> float:
        """Half the width of the median's confidence interval; infinite for fewer than three times.

        It is the notch of a box plot (McGill, Tukey, Larsen 1978).
        """
        if len(self.good) < 3:
            return float("inf")
        return 1.57 * 2 * half_width_s(self.good) / math.sqrt(len(self.good))


def half_width_s(times_s: Sequence[float]) -> float:
    """Return half the distance between the quartiles; 0 for fewer than two times."""
    if len(times_s) < 2:
        return 0.0
    low_s, _, high_s = statistics.quantiles(times_s, n=4, method="inclusive")
    return (high_s - low_s) / 2


def spread_of(values: Sequence[float]) -> float:
    """Return half the distance between the quartiles, over the median; 0 for fewer than two."""
    return half_width_s(values) / statistics.median(values)
