"""Shares of replicas: the rows of each replica, and the sum of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from math import inf

from hetpipe.cost.table import CostTable
from hetpipe.simulate.times import ring_s


def divide_samples(samples: int, speeds: Sequence[float]) -> list[int]:
    """Divide `samples` into whole numbers in the ratio of `speeds`, each 1 or more if possible.

    The first of equal ones get the remainder.
    """
    if not 0 < sum(speeds) < inf:  # a device cannot run it: the price will say so
        speeds = [1.0] * len(speeds)
    exact = [samples * speed / sum(speeds) for speed in speeds]
    least = 1 if samples >= len(speeds) else 0
    rows = [max(least, int(part)) for part in exact]
    order = sorted(range(len(rows)), key=lambda n: rows[n] - exact[n])
    for n in order[: max(0, samples - sum(rows))]:
        rows[n] += 1
    while sum(rows) > samples:
        several = [n for n in range(len(rows)) if rows[n] > least]
        rows[max(several, key=lambda n: rows[n] - exact[n])] -= 1
    return rows


def all_reduce_s(table: CostTable, devices: Sequence[str], lo: int, hi: int) -> float:
    """Return the seconds in which replicas sum their gradients, with a separate link for each pair.

    On links of this machine they send each other all gradients, and upload the sums. On described
    links they sum in a ring, as vendors' libraries do: the slowest link carries 2 (r - 1) / r of
    the bytes.
    """
    nbytes = sum(layer.params_nbytes for layer in table.layers[lo:hi])
    if _is_ring(table, devices):
        ring = [table.link(*way) for way in _hops(devices)]
        latency_s = max(link.latency_s for link in ring)
        bandwidth_Bps = min(link.sum_Bps for link in ring)
        return ring_s(len(devices), nbytes, latency_s, bandwidth_Bps)
    seconds = []
    for here in devices:
        links = [table.link(here, there) for there in devices if there != here]
        seconds.append(2 * sum(link.latency_s + nbytes / link.sum_Bps for link in links))
    return max(seconds)


def all_reduce_nbytes(
    table: CostTable, devices: Sequence[str], lo: int, hi: int
) -> dict[tuple[str, str], float]:
    """Return the bytes that one replica sends to another in a sum of `all_reduce_s`, by pair."""
    nbytes = sum(layer.params_nbytes for layer in table.layers[lo:hi])
    if _is_ring(table, devices):
        return dict.fromkeys(_hops(devices), 2 * (len(devices) - 1) / len(devices) * nbytes)
    return dict.fromkeys(permutations(devices, 2), float(nbytes))


def _is_ring(table: CostTable, devices: Sequence[str]) -> bool:
    return all(table.link(*way).label == "modelled" for way in _hops(devices))


def _hops(devices: Sequence[str]) -> list[tuple[str, str]]:
    return list(pairwise((*devices, devices[0])))
