"""The lower bound of a step on given devices, for any partition, replicas and schedule.

A micro-batch's work on layer l may go to any device, in any shares x_ld. The slowest device then
takes T = min over x of max_d sum_l x_ld t_ld, a linear programme. Its dual is

    T = max over y >= 0, sum y = 1, of sum_l min_d y_d t_ld

so every choice of y gives a lower bound. Moves along the subgradient raise the bound: a device that
would have more load than the mean gets a larger y_d. A step takes at least as long as the work of
all micro-batches, divided in this way. If the schedule flushes, a step also takes at least the
passes of one micro-batch through all layers, each layer on its fastest device.

If servers and a network describe the links, each layer gives another bound: r devices run its
passes, and then sum its gradients. If no server has r devices, the ring has a link of the network.
The best r differs by layer, and the slowest layer decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

import numpy as np

from hetpipe.cluster.links import fastest_links
from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.plan.costs import Array
from hetpipe.plan.proposal import PlannerOptions, Tables
from hetpipe.schedule.rule import rule_of

ROUNDS = 400
MOST_SLOWED = 4
"""Devices up to which each choice of some of them gets a bound."""
SLOW_S = 1e12  # stands for a layer that a device cannot run


def lower_bound_s(tables: Tables, devices: Iterable[str], options: PlannerOptions) -> float:
    """Return a lower bound of the seconds of a step on any of these devices.

    It uses the least time per sample over the sizes that have tables. Micro-batches of sizes
    between these, and the shares of replicas, are assumed to take at least this time per sample.
    """
    names = list(dict.fromkeys(devices))
    bounds_s = [
        _bound_s({size: table.beside(count) for size, table in tables.items()}, used, options)
        for count, used in _used(tables, names)
    ]
    return min(bounds_s)


def _used(tables: Tables, names: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield numbers of devices that a plan uses, and these devices.

    Devices that slow each other down are faster in a plan with few of them. Of more than
    `MOST_SLOWED`, all may be used, each as fast as alone.
    """
    if all(table.beside(1) is table for table in tables.values()):
        yield len(names), names
    elif len(names) > MOST_SLOWED:
        yield 1, names
    else:
        for count in range(1, len(names) + 1):
            yield from ((count, list(used)) for used in combinations(names, count))


def _bound_s(tables: Tables, names: list[str], options: PlannerOptions) -> float:
    """Return a lower bound of a step on these devices, at the times of the tables."""
    per_sample_s = np.min(
        [_passes_s(table, names) / size for size, table in tables.items()], axis=0
    )
    bound_s = options.mini_batch * shared_s(per_sample_s)
    if not all(rule_of(schedule).flushes for schedule in options.schedules):
        return bound_s
    shortest_s = np.min([_passes_s(table, names) for table in tables.values()], axis=0)
    bound_s = max(bound_s, float(shortest_s.min(axis=0).sum()))
    if options.channels:  # a plan may split layers
        return bound_s
    table = next(iter(tables.values()))
    return max(bound_s, slowest_layer_s(table, options.mini_batch * per_sample_s))


def slowest_layer_s(table: CostTable, times_s: Array) -> float:
    """Return a lower bound of the slowest layer's passes and sum, on any number of replicas.

    `times_s[d, l]` is the time of layer l on device d for the whole mini-batch. The bound is 0 if
    links are described one by one.
    """
    fastest = fastest_links(table.links)
    if fastest is None or not table.trains:
        return 0.0
    inside, between, largest = fastest
    nbytes = np.array([layer.params_nbytes for layer in table.layers], float)
    replicas = np.arange(1, len(times_s) + 1)[:, None]
    sums_s = _least_ring_s(replicas, nbytes, between)
    fit = replicas[:largest]
    sums_s[:largest] = np.minimum(sums_s[:largest], _least_ring_s(fit, nbytes, inside))
    sums_s[0] = 0.0
    with np.errstate(divide="ignore"):  # a layer may need no time
        rates = np.cumsum(np.sort(1 / times_s, axis=0)[::-1], axis=0)
    return float((1 / rates + sums_s).min(axis=0).max())


def _least_ring_s(replicas: Array, nbytes: Array, links: Sequence[LinkCost]) -> Array:
    """Return the seconds of the fastest ring, as `ring_s` does; infinite without links."""
    if not links:
        return np.full((len(replicas), len(nbytes)), math.inf)
    latency_s = min(link.latency_s for link in links)
    bandwidth_Bps = max(link.sum_Bps for link in links)
    return 2 * (replicas - 1) * (latency_s + nbytes / (replicas * bandwidth_Bps))


def shared_s(times_s: Array) -> float:
    """Return a lower bound of the slowest device's seconds if layers are divided freely.

    `times_s[d, l]` is the time of layer l on device d. Equal devices have one common weight y.
    """
    kinds, counts = np.unique(times_s, axis=0, return_counts=True)
    sums_s = kinds.sum(axis=1)
    if not sums_s.all():
        return 0.0  # a device needs no time at all
    weights = 1 / sums_s  # the exact dual if devices differ only by a factor
    best_s = 0.0
    for number in range(ROUNDS):
        weights = weights / (weights @ counts)
        priced = weights[:, None] * kinds
        chosen = priced.argmin(axis=0)
        best_s = max(best_s, float(priced.min(axis=0).sum()))
        loads_s = np.bincount(chosen, kinds[chosen, range(kinds.shape[1])], len(kinds)) / counts
        rate = 0.5 / np.sqrt(1 + number)
        weights = weights * np.exp(rate * (loads_s / max(loads_s.mean(), 1e-300) - 1).clip(-1, 1))
    return best_s


def _passes_s(table: CostTable, devices: list[str]) -> Array:
    """Return the seconds of every layer on every device, without the fixed overhead."""
    kinds = {
        (id(cost.layers), cost.overhead_s): cost
        for cost in (table.devices[device] for device in devices)
    }
    numbers = {kind: number for number, kind in enumerate(kinds)}
    rows = np.array(
        [
            [
                SLOW_S
                if layer.impossible
                else max(layer.forward_s - cost.overhead_s, 0.0)
                + max(layer.backward_s - cost.overhead_s, 0.0)
                for layer in cost.layers
            ]
            for cost in kinds.values()
        ]
    )
    costs = (table.devices[device] for device in devices)
    return rows[[numbers[id(cost.layers), cost.overhead_s] for cost in costs]]
