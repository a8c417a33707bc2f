"""Divides a number of samples between devices."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def divide_samples(samples: int, speeds: Sequence[float]) -> list[int]:
    """Divide `samples` into whole numbers in the ratio of `speeds`, each 1 or more if possible.

    The remainder goes to the largest fractions, and among equal fractions to the first.
    """
    if not 0 < sum(speeds) < inf:  # a device cannot run the layers: the price will be infinite
        speeds = [1.0] * len(speeds)
    whole = sum(speeds)
    exact = [samples * speed / whole for speed in speeds]
    least = 1 if samples >= len(speeds) else 0
    rows = [max(least, int(part)) for part in exact]
    order = sorted(range(len(rows)), key=lambda n: rows[n] - exact[n])
    for n in order[: max(0, samples - sum(rows))]:
        rows[n] += 1
    while sum(rows) > samples:
        several = [n for n in range(len(rows)) if rows[n] > least]
        rows[max(several, key=lambda n: rows[n] - exact[n])] -= 1
    return rows
