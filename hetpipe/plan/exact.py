"""The exact partition for a fixed order of devices: the lowest slowest stage."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hetpipe.plan.costs import Array


def exact(costs: Sequence[Array]) -> tuple[int, ...] | None:
    """Return the cuts that minimise the slowest stage; None if no partition is finite.

    `costs[n][lo, hi]` is the time of layers lo..hi as stage n, infinite where impossible. Dynamic
    programme over (stages placed, layers placed), O(N L^2) in numpy: 100 layers on 4 devices take
    0.2 ms. A bisection on the bottleneck needs O(N L) per limit, but only for additive times
    without a bound on memory; here any costs work. (Pinar, Tabak, Aykanat 2008.)
    """
    slowest = costs[0][0]  # slowest[hi]: slowest stage so far, for layers 0..hi
    choices = []
    for cost in costs[1:]:
        joined = np.maximum(slowest[:, None], cost)
        choices.append(joined.argmin(axis=0))
        slowest = joined.min(axis=0)
    if math.isinf(slowest[-1]):
        return None
    cuts = [len(slowest) - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return tuple(reversed(cuts[1:]))


def bottleneck(costs: Sequence[Array], cuts: Sequence[int]) -> float:
    """Return the seconds of the slowest stage of a partition."""
    return max(stage_times(costs, cuts))


def stage_times(costs: Sequence[Array], cuts: Sequence[int]) -> list[float]:
    """Return the seconds of the stages under `cuts`."""
    ends = [0, *cuts, costs[0].shape[0] - 1]
    return [float(cost[lo, hi]) for cost, lo, hi in zip(costs, ends, ends[1:], strict=False)]
