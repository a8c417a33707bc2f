"""Probe: the seconds of two short fixed programs on a device. Their change is the device's drift.

Machines are shared, throttle and change, so costs become wrong with time. A probe measures the
change without measuring any layer again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated

from hetpipe.errors import CostError
from hetpipe.records import Number, Positive

AboveZero = Annotated[float, Number(most=1e9, above=True)]
Relative = Annotated[float, Number(most=1e9)]


@dataclass(frozen=True)
class Probe:
    """Seconds of a fixed matrix product and of a fixed elementwise pass.

    `spread` is the larger of their relative spreads: half the distance between the quartiles, over
    the median.
    """

    arithmetic_s: AboveZero
    memory_s: AboveZero
    spread: Relative
    order: Positive  # rows and columns of the product's matrices
    nbytes: Positive  # bytes that the elementwise pass reads

    def __post_init__(self) -> None:
        for name, time_s in (("product", self.arithmetic_s), ("pass", self.memory_s)):
            if not 0.0 < time_s < math.inf:
                raise CostError(
                    f"a probe's {name} takes {time_s} s: it must take more than 0 s and a finite "
                    "time; check the clock of the device's machine"
                )

    def scaled(self, arithmetic: float, memory: float) -> Probe:
        """Return the probe with its times multiplied by these factors."""
        return replace(
            self,
            arithmetic_s=self.arithmetic_s * arithmetic,
            memory_s=self.memory_s * memory,
        )

    def towards(self, other: Probe, share: float) -> Probe:
        """Return a probe between this probe (`share` 0) and `other` (`share` 1)."""
        rest = 1 - share
        return replace(
            self,
            arithmetic_s=rest * self.arithmetic_s + share * other.arithmetic_s,
            memory_s=rest * self.memory_s + share * other.memory_s,
            spread=max(self.spread, other.spread),
        )


@dataclass(frozen=True)
class Drift:
    """The time of each program now, over its time when the costs were measured. Above 1, the device
    has become slower."""

    arithmetic: float
    memory: float
    noise: float = 0.0  # relative spread of both probes

    @property
    def factor(self) -> float:
        """The factor by which to multiply costs. Layers compute and move memory, so both ratios
        count."""
        return math.sqrt(self.arithmetic * self.memory)

    @property
    def spread(self) -> float:
        """Relative spread of `factor`, from the probes' noise and the distance between the ratios.

        The true factor of a layer is somewhere between the two ratios. So the distance between the
        quartiles is half the distance between the ratios, and the spread is half of that.
        """
        return math.hypot(self.noise, abs(math.log(self.arithmetic / self.memory)) / 4)


def drift(then: Probe, now: Probe) -> Drift:
    """Return the drift of a device from probe `then` to probe `now`.

    Even without a drift, two probes differ by their noise. So a change d (the logarithm of a ratio)
    with the noise n is multiplied by max(0, 1 - n^2 / d^2): James and Stein's estimate of a change
    of unknown size ("Estimation with quadratic loss", 1961). Raises `CostError` if the programs of
    the probes differ.
    """
    if (then.order, then.nbytes) != (now.order, now.nbytes):
        raise CostError(
            f"probes of {then.order} rows and {then.nbytes} bytes, and of {now.order} and "
            f"{now.nbytes}, cannot be compared: probe again with the sizes of the first"
        )
    noise = math.hypot(then.spread, now.spread)
    return Drift(
        _credible(now.arithmetic_s / then.arithmetic_s, noise),
        _credible(now.memory_s / then.memory_s, noise),
        noise,
    )


def _credible(ratio: float, noise: float) -> float:
    change = math.log(ratio)
    if abs(change) <= noise:
        return 1.0
    return math.exp(change * (1 - (noise / change) ** 2))
