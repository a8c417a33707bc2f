"""From the times of rounds to the costs of layers, with their spread. It runs nothing."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hetpipe.cost.probe import Probe
from hetpipe.cost.table import LayerCost
from hetpipe.profile.clock import Samples, half_width_s
from hetpipe.profile.patterns import Network
from hetpipe.profile.probe import median_probe, warn_of_bad
from hetpipe.profile.profiler import BACKWARD, FORWARD, UPDATE, Taken, Times

PRECISION = 0.02  # relative error of a median that is small enough
LEAST_ALONE = 0.05  # of the time beside others; less is no measurement


@dataclass(frozen=True)
class Series:
    """All rounds of a member, `name` for messages: beside the others, alone, and after updates."""

    name: str
    network: Network
    refused: Mapping[int, str]  # by pattern, why the device cannot run it
    beside: Sequence[Taken]
    alone: Sequence[Taken] = ()
    updates: Sequence[Taken] = ()

    def check(self, sizes: Sequence[int]) -> None:
        """Raises `CostError` for a pass most of whose times cannot be believed.

        Warns once if others have such times.
        """
        every = Samples()
        for size in sizes:
            for pattern in self.able:
                layer = self.network.patterns[pattern].stage
                for which, word in ((FORWARD, "forward"), (BACKWARD, "backward")):
                    samples = _samples(self.beside, size, pattern, which)
                    samples.check(f"{self.name}: a {word} of layer {layer}")
                    every.extend((*samples.good, *samples.bad))
        warn_of_bad(f"{self.name}: a pass", every)

    def layers(self, size: int) -> tuple[LayerCost, ...]:
        """The costs of every layer at this size."""
        usual = self.usual(size)
        costs = {pattern: self._cost(size, pattern).scaled(usual) for pattern in self.able}
        endless = (math.inf, math.inf, math.inf)
        refusals = {pattern: LayerCost(*endless, why) for pattern, why in self.refused.items()}
        return tuple((costs | refusals)[pattern] for pattern in self.network.layers)

    def spread(self, size: int) -> float:
        """The relative spread of the network's time from slice to slice."""
        ratios = self._ratios(size)
        return half_width_s(ratios) / statistics.median(ratios) if len(ratios) > 1 else 0.0

    def usual(self, size: int) -> float:
        """The network's time in the usual slice over the sum of its passes' medians.

        It is above 1 where something interrupts now and then: most passes do not notice, and a step
        does.
        """
        ratios = self._ratios(size)
        return statistics.median(ratios) if ratios else 1.0

    def alone_factor(self, size: int) -> float:
        """The network's time while the other devices are idle, over the time beside them.

        It is 1 if it was not measured, or is no further from 1 than one slice is from another.
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
        """The probe of the usual slice, from those that followed the slices; None without any.

        Where other work slowed a slice it slowed its probe too. So each is divided by the slice's
        time over the usual one: costs and probe are then of one and the same speed.
        """
        ratios = [self._ratio(taken, sizes) for taken in self.beside]
        pairs = [(p, ratio) for p, ratio in zip(probes, ratios, strict=True) if ratio is not None]
        if not pairs:
            return None
        usual = statistics.median(ratio for _, ratio in pairs)
        return median_probe([p.scaled(usual / ratio, usual / ratio) for p, ratio in pairs])

    def uncertain(self, size: int) -> list[int]:
        """The patterns whose median is not known well enough: within `PRECISION` of themselves, or
        of an even share of the network."""
        times_s, errors_s = {}, {}
        for pattern in self.able:
            passes = [_samples(self.beside, size, pattern, n) for n in (FORWARD, BACKWARD)]
            known = [samples for samples in passes if samples.good]
            if known:  # else `check` refuses it
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
        usual = forward_s, backward_s, 0.0
        width_s = sum(half_width_s(samples.good) for samples in passes)
        spread = width_s / sum(usual) if sum(usual) else 0.0
        after = [_samples(self.updates, size, pattern, which, 1) for which in (FORWARD, BACKWARD)]
        update = _samples(self.updates, 0, pattern, UPDATE, 1)
        update.check(f"{self.name}: an update of layer {self.network.patterns[pattern].stage}")
        forward_s, backward_s, update_s = (
            samples.median_s if samples.good else 0.0 for samples in (*after, update)
        )
        return LayerCost(*step_times(usual, (forward_s, backward_s, update_s)), spread=spread)

    def _median_s(self, size: int, pattern: int, which: int) -> float:
        samples = _samples(self.beside, size, pattern, which)
        return samples.median_s if samples.good else 0.0

    def _ratios(self, size: int) -> list[float]:
        """`_ratio` of each slice that has passes of this size."""
        ratios = (self._ratio(taken, {size}) for taken in self.beside)
        return [ratio for ratio in ratios if ratio is not None]

    def _ratio(self, taken: Taken, sizes: Collection[int]) -> float | None:
        """The time of a slice's passes of these sizes over as many medians of theirs.

        A slice without some patterns is compared by those that it has; None if it has none.
        """
        now_s = usual_s = 0.0
        for place, times_s in taken.times_s.items():
            if place[0] in sizes:
                good = Samples.of(times_s).good
                count = self._counts[place[1]]
                now_s += count * sum(good)
                usual_s += count * len(good) * self._median_s(*place)
        return now_s / usual_s if usual_s > 0 else None


def step_times(usual: Times, after_update: Times) -> Times:
    """The times of usual passes, and of an update with the time that it adds to the next passes.

    Those find new weights, which are not in the caches and must be packed again.
    """
    forward_s, backward_s, update_s = *usual[:2], after_update[2]
    if update_s > 0:
        update_s += max(0.0, sum(after_update[:2]) - forward_s - backward_s)
    return forward_s, backward_s, update_s


def _samples(
    taken: Sequence[Taken], size: int, pattern: int, which: int, first: int = 0
) -> Samples:
    """The times of a pass; of each list from the one numbered `first`."""
    place = size, pattern, which
    return Samples.of(
        time_s for one in taken if place in one.times_s for time_s in one.times_s[place][first:]
    )
