"""Divides the work of a stage between its replicas: by rows of each micro-batch, or by mini-batches
in turn (station 2 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple

from hetpipe.buckets import like
from hetpipe.division import divide_samples
from hetpipe.errors import HetpipeError


class Replica(NamedTuple):
    """One of a stage's replicas."""

    stage: int
    number: int


Rows = tuple[int, int]
"""The first row, and the row after the last one."""


@dataclass(frozen=True)
class Drawn:
    """A mini-batch that the worker has read from its open source `key`, see `hp.Remote`."""

    key: str
    parts: Mapping[int, Sequence[tuple[tuple[str, ...], int, int]]]
    """By stage and micro-batch, the leaves to read, and the first row and the row after the last
    one."""


@cache
def divide(samples: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    """Return how many rows of a micro-batch each replica gets: one or more.

    Raises `HetpipeError` if there are fewer samples than replicas.
    """
    if samples < len(weights):
        raise HetpipeError(
            f"{len(weights)} replicas cannot split a micro-batch of {samples} samples: one of them "
            "would get no sample; use fewer micro-batches or fewer replicas"
        )
    return tuple(divide_samples(samples, weights))


@cache
def _ends(samples: int, weights: tuple[float, ...]) -> tuple[Rows, ...]:
    return tuple(pairwise((0, *accumulate(divide(samples, weights)))))


@dataclass(frozen=True)
class Shares:
    """The share of each replica of each stage in the work.

    The replicas of stage n divide every micro-batch by `weights[n]` or, with `in_turn`, take whole
    mini-batches in turn. If they take turns, an update applies the mean gradient of a round or,
    without `averages`, the gradient of one mini-batch.
    """

    weights: tuple[tuple[float, ...], ...]
    in_turn: bool = False
    averages: bool = True

    def replicas(self, stage: int) -> list[Replica]:
        return [Replica(stage, number) for number in range(len(self.weights[stage]))]

    def rows(self, replica: Replica, samples: int) -> Rows:
        """Return a replica's rows of a micro-batch in which the replica takes part."""
        weights = self.weights[replica.stage]
        if self.in_turn or len(weights) == 1:
            return 0, int(samples)
        return _ends(samples, weights)[replica.number]

    def count(self, replica: Replica, samples: int) -> int:
        """Return the number of these rows, as a size in the bucket of `samples`."""
        lo, hi = self.rows(replica, samples)
        return like(hi - lo, samples)

    def takes(self, replica: Replica, mini_batch: int) -> bool:
        """Return whether a replica computes any part of a mini-batch."""
        count = len(self.weights[replica.stage])
        return not self.in_turn or mini_batch % count == replica.number

    def per_update(self, stage: int) -> int:
        """Return the number of mini-batches that an update of a stage applies."""
        return len(self.weights[stage]) if self.in_turn and self.averages else 1

    def meet(self, one: Replica, other: Replica) -> bool:
        """Return whether two replicas of neighbouring stages ever compute the same mini-batch."""
        common = gcd(len(self.weights[one.stage]), len(self.weights[other.stage]))
        return not self.in_turn or one.number % common == other.number % common


def overlap(one: Rows, other: Rows) -> Rows:
    """Return the rows that both ranges contain; (0, 0) if there are none."""
    lo, hi = max(one[0], other[0]), min(one[1], other[1])
    return (lo, hi) if lo < hi else (0, 0)
