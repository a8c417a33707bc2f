"""Estimates the costs of layers, with their spread, from the times of rounds; runs nothing."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hetpipe.cost.probe import Probe
from hetpipe.cost.table import LayerCost
from hetpipe.errors import CostError
from hetpipe.profile.clock import Samples, credible, half_width_s, spread_of
from hetpipe.profile.patterns import Network
from hetpipe.profile.probing import median_probe, warn_of_bad
from hetpipe.profile.profiler import BACKWARD, FORWARD, UPDATE, Times

PRECISION = 0.02  # sufficient relative error of a median
# Lower ratios of a device's time alone to its time beside other devices are faulty measurements.
LEAST_ALONE = 0.05


@dataclass(frozen=True)
class Series:
    """The times of a member's rounds: `beside` the other members as they compute, and `alone`.

    `beside` has a `Times` per slice. `updates` has the times of updates and of the first passes
    after each, then the times of the second passes. `name` is for messages.
    """

    name: str
    network: Network
    refused: Mapping[int, str]  # by pattern, why the device cannot run it
    beside: Sequence[Times]
    alone: Sequence[Times] = ()
    updates: tuple[Times, Times] = field(default_factory=lambda: (Times(), Times()))

    def check(self, sizes: Sequence[int]) -> None:
        """Raise `CostError` for a forward without times, or if most times of a pass are bad.

        Otherwise warns once if some times are bad.
        """
        every = Samples()
        for size in sizes:
            for pattern in self.able:
                layer = self.network.patterns[pattern].stage
                for which, word in ((FORWARD, "forward"), (BACKWARD, "backward")):
                    samples = _samples(self.beside, size, pattern, which)
                    if which == FORWARD and not (samples.good or samples.bad):
                        raise CostError(
                            f"{self.name}: layer {layer} was not measured at micro-batches of "
                            f"{size}, so its cost is unknown; profile again"
                        )
                    samples.check(f"{self.name}: a {word} of layer {layer}")
                    every.extend((*samples.good, *samples.bad))
        warn_of_bad(f"{self.name}: a pass", every)

    def layers(self, size: int) -> tuple[LayerCost, ...]:
        """Return the costs of every layer at this size."""
        usual = self.usual(size)
        costs = {pattern: self._cost(size, pattern).scaled(usual) for pattern in self.able}
        endless = (math.inf, math.inf, math.inf)
        refusals = {pattern: LayerCost(*endless, why) for pattern, why in self.refused.items()}
        return tuple((costs | refusals)[pattern] for pattern in self.network.layers)

    def spread(self, size: int) -> float:
        """Return the relative spread of the network's time from slice to slice."""
        ratios = self._ratios(size)
        return spread_of(ratios) if ratios else 0.0

    def usual(self, size: int) -> float:
        """Return the median of the slices' times, each divided by the sum of its passes' medians.

        It exceeds 1 if something sometimes interrupts the device. The median of a pass does not
        show the interruptions, but they lengthen a step.
        """
        ratios = self._ratios(size)
        return statistics.median(ratios) if ratios else 1.0

    def alone_factor(self, size: int) -> float:
        """Return the network's time while other devices are idle, divided by its time beside them.

        Returns 1 if nothing was measured alone, or if the quotient is not below 1 by more than the
        spread of slices.
        """
        alone_s = beside_s = 0.0
        for pattern in self.able:
            for which in (FORWARD, BACKWARD):
                samples = _samples(self.alone, size, pattern, which)
                if samples.good:
                    alone_s += self._counts[pattern] * samples.mean_s
                    beside_s += self._counts[pattern] * self._median_s(size, pattern, which)
        beside_s *= self.usual(size)
        factor = max(alone_s / beside_s, LEAST_ALONE) if beside_s and alone_s else 1.0
        return factor if factor < 1 - self.spread(size) else 1.0

    def usual_probe(self, probes: Sequence[Probe], sizes: Collection[int]) -> Probe | None:
        """Return the probe of the usual slice, from the probes after all slices; None without any.

        Other work that slowed a slice also slowed its probe. So each probe is divided by its
        slice's time relative to the usual slice. Then costs and probe belong to the same speed.
        """
        ratios = [self._ratio(measured, sizes) for measured in self.beside]
        pairs = [(p, ratio) for p, ratio in zip(probes, ratios, strict=True) if ratio is not None]
        if not pairs:
            return None
        usual = statistics.median(ratio for _, ratio in pairs)
        return median_probe([p.scaled(usual / ratio, usual / ratio) for p, ratio in pairs])

    def uncertain(self, size: int) -> list[int]:
        """Return the patterns whose median is not known precisely.

        The error of a precise median is at most `PRECISION` of the median, or of the network's time
        divided by the number of patterns.
        """
        times_s, errors_s = {}, {}
        for pattern in self.able:
            passes = [_samples(self.beside, size, pattern, n) for n in (FORWARD, BACKWARD)]
            known = [samples for samples in passes if samples.good]
            if known:  # otherwise `check` raises an error
                count = self._counts[pattern]
                times_s[pattern] = count * sum(samples.median_s for samples in known)
                errors_s[pattern] = count * sum(samples.error_s for samples in known)
        share_s = sum(times_s.values()) / max(len(times_s), 1)
        return [
            pattern
            for pattern, error_s in errors_s.items()
            if error_s > PRECISION * max(times_s[pattern], share_s)
        ]

    @cached_property
    def able(self) -> tuple[int, ...]:
        """The patterns that the device can run."""
        patterns = range(len(self.network.patterns))
        return tuple(pattern for pattern in patterns if pattern not in self.refused)

    @cached_property
    def _counts(self) -> Counter[int]:
        return Counter(self.network.layers)

    def _cost(self, size: int, pattern: int) -> LayerCost:
        passes = [_samples(self.beside, size, pattern, which) for which in (FORWARD, BACKWARD)]
        forward_s, backward_s = (self._median_s(size, pattern, n) for n in (FORWARD, BACKWARD))
        usual_s = forward_s + backward_s
        width_s = sum(half_width_s(samples.good) for samples in passes)
        spread = width_s / usual_s if usual_s else 0.0
        update = _samples(self.updates[:1], 0, pattern, UPDATE)
        update.check(f"{self.name}: an update of layer {self.network.patterns[pattern].stage}")
        update_s = update.median_s + self._added_s[pattern] if update.good else 0.0
        return LayerCost(forward_s, backward_s, update_s, spread=spread)

    @cached_property
    def _added_s(self) -> dict[int, float]:
        """Seconds that an update adds to the passes after it, by pattern."""
        after, then = self.updates
        changes_s = {
            pattern: sum(
                change_s(after.times_s[place], then.times_s[place])
                for place in after.times_s
                if place[1] == pattern and place[2] != UPDATE and place in then.times_s
            )
            for pattern in self.able
            if any(place[1:] == (pattern, UPDATE) for place in after.times_s)
        }
        return added_s(changes_s, self._counts)

    def _median_s(self, size: int, pattern: int, which: int) -> float:
        samples = _samples(self.beside, size, pattern, which)
        return samples.median_s if samples.good else 0.0

    def _ratios(self, size: int) -> list[float]:
        """Return `_ratio` for each slice that has passes of this size."""
        ratios = (self._ratio(measured, {size}) for measured in self.beside)
        return [ratio for ratio in ratios if ratio is not None]

    def _ratio(self, measured: Times, sizes: Collection[int]) -> float | None:
        """Return the time of a slice's passes of these sizes, divided by the sum of their medians.

        Only passes that the slice has are compared; None if it has none of these sizes.
        """
        now_s = usual_s = 0.0
        for place, times_s in measured.times_s.items():
            if place[0] in sizes:
                good = Samples.of(times_s).good
                count = self._counts[place[1]]
                now_s += count * sum(good)
                usual_s += count * len(good) * self._median_s(*place)
        return now_s / usual_s if usual_s > 0 else None


def change_s(after_s: Sequence[float], then_s: Sequence[float]) -> float:
    """Return the median extra seconds of a pass's first run after an update; 0 if unknown."""
    pairs = zip(after_s, then_s, strict=False)
    changes_s = [one_s - two_s for one_s, two_s in pairs if credible(one_s) and credible(two_s)]
    return statistics.median(changes_s) if changes_s else 0.0


def added_s(changes_s: Mapping[int, float], counts: Mapping[int, int]) -> dict[int, float]:
    """Return the changes by pattern with 0 for negative changes, scaled to keep their sum.

    A negative sum becomes 0. In the sum over all layers, noise cancels. If the changes above 0 were
    not scaled, their noise would remain. `counts` has the number of layers of each pattern.
    """
    total_s = sum(counts[pattern] * one_s for pattern, one_s in changes_s.items())
    above_s = sum(counts[pattern] * max(one_s, 0.0) for pattern, one_s in changes_s.items())
    share = max(total_s, 0.0) / above_s if above_s else 0.0
    return {pattern: share * max(one_s, 0.0) for pattern, one_s in changes_s.items()}


def _samples(measured: Sequence[Times], size: int, pattern: int, which: int) -> Samples:
    """Return the times of a pass."""
    place = size, pattern, which
    return Samples.of(
        time_s for one in measured if place in one.times_s for time_s in one.times_s[place]
    )
