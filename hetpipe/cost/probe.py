"""Probe: seconds of two short fixed programs on a device. Their change is the device's drift.

Costs are as old as their profile, and machines are shared, throttle and change. A probe measures
the change without measuring any layer again.
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

    `spread` is the larger relative spread of both: half the distance of the quartiles, over the
    median.
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
                    f"a probe's {name} takes {time_s} s: it must take more than 0 s; check the "
                    "clock of the device's machine"
                )

    def scaled(self, arithmetic: float, memory: float) -> Probe:
        """Return the probe with both times multiplied."""
        return replace(
            self,
            arithmetic_s=self.arithmetic_s * arithmetic,
            memory_s=self.memory_s * memory,
        )

    def towards(self, other: Probe, share: float) -> Probe:
        """Return a probe between this one (`share` 0) and `other` (`share` 1)."""
        rest = 1 - share
        return replace(
            self,
            arithmetic_s=rest * self.arithmetic_s + share * other.arithmetic_s,
            memory_s=rest * self.memory_s + share * other.memory_s,
            spread=max(self.spread, other.spread),
        )


@dataclass(frozen=True)
class Drift:
    """A device's time now over its time when its costs were measured; above 1 it is slower."""

    arithmetic: float
    memory: float
    noise: float = 0.0  # relative spread of both probes

    @property
    def factor(self) -> float:
        """The factor of costs. Layers compute and move memory, so both ratios count."""
        return math.sqrt(self.arithmetic * self.memory)

    @property
    def spread(self) -> float:
        """Relative spread of `factor`, from the probes' noise and the distance of the two ratios.

        A layer's factor is between the two ratios, so they are the ends of its interval, and the
        quartiles are half as far apart.
        """
        return math.hypot(self.noise, abs(math.log(self.arithmetic / self.memory)) / 4)


def drift(then: Probe, now: Probe) -> Drift:
    """Return the drift from one probe of a device to another. Raises `CostError` if their programs
    differ.

    Two probes of an unchanged device differ by their noise. So a change d (the logarithm of a
    ratio) with the noise n counts with the share max(0, 1 - n^2 / d^2): James and Stein's estimate,
    "Estimation with quadratic loss" (1961), of a change of unknown size.
    """
    if (then.order, then.nbytes) != (now.order, now.nbytes):
        raise CostError(
            f"probes of {then.order} rows and {then.nbytes} bytes, and of {now.order} and "
            f"{now.nbytes}, cannot be compared: take the second one like the first"
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
