"""Exact: the lowest slowest stage, for the cluster's order of devices and for better orders.

One stage on each device; for a fixed order the partition is optimal (`hetpipe.plan.exact`). Other
orders come from exchanges of two devices while these lower the slowest stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from hetpipe.cluster.cluster import Cluster
from hetpipe.plan.device_types import DeviceType, free_order
from hetpipe.plan.exact import stage_times
from hetpipe.plan.groups import group_matrix
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import chosen
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, Tables, in_flight, single_device_groups
from hetpipe.plan.search import best_cuts, is_large, propose_partitions, worth_trying

STATES = 2**16
"""The best order is computed for at most this many counts of devices by kind."""
EXCHANGES = 60
"""The most exchanges of devices that are tried."""


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions) -> Plan:
    """Return the fastest of the exact partitions. Raises `PlanError`."""
    return chosen("exact", proposals, costs, cluster, options)


def proposals(priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """Yield the optimal cuts for each order, schedule and number of micro-batches."""
    for order in orders(priced, cluster.ids):
        yield from propose_partitions(priced, single_device_groups(order))
    if priced.options.free_order and len(cluster.ids) > 1:
        order = typed_order(priced, cluster.ids)
        yield from propose_partitions(priced, single_device_groups(order))


def typed_order(priced: Priced, members: Sequence[str]) -> tuple[str, ...]:
    """Return the best order for free transfers and equal members of a kind.

    It omits members that make nothing faster; with many kinds, it is the given order.
    """
    table = priced.table(
        priced.options.size(worth_trying(priced, single_device_groups(members))[-1])
    )
    kinds: dict[int, list[str]] = {}
    for member in members:
        kinds.setdefault(id(table.devices[member].layers), []).append(member)
    if math.prod(len(names) + 1 for names in kinds.values()) > STATES:
        return tuple(members)
    types = []
    for names in kinds.values():
        cost = table.devices[names[0]]
        own_s = [
            max(layer.forward_s + layer.backward_s - 2 * cost.overhead_s, 0.0)
            for layer in cost.layers
        ]
        types.append(DeviceType(names[0], len(names), np.array(own_s), 2 * cost.overhead_s))
    answer = free_order(types)
    if answer is None:
        return tuple(members)
    names_of = [iter(names) for names in kinds.values()]
    return tuple(next(names_of[stage.kind]) for stage in answer[1])


def orders(priced: Priced, members: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the given order, and if the options allow others the one that exchanges lead to.

    With many layers the order of devices matters little, so large cases have only the given one.
    """
    given = tuple(members)
    if (
        not priced.options.free_order
        or len(members) < 2
        or is_large(priced, single_device_groups(given))
    ):
        return [given]
    return list(dict.fromkeys([given, _exchanged(priced, given)]))


def _exchanged(priced: Priced, order: tuple[str, ...]) -> tuple[str, ...]:
    """Return the order after all exchanges of the slowest stage's device that lower that stage."""
    slowest_s, slowest = _slowest(priced, order)
    left, improving = EXCHANGES, True
    while improving and left > 0:
        improving = False
        for other in range(len(order)):
            if left <= 0 or other == slowest:
                continue
            left -= 1
            exchanged = list(order)
            exchanged[slowest], exchanged[other] = order[other], order[slowest]
            trial_s, trial = _slowest(priced, tuple(exchanged))
            if trial_s < slowest_s:
                order, slowest_s, slowest, improving = tuple(exchanged), trial_s, trial, True
                break
    return order


def _slowest(priced: Priced, order: tuple[str, ...]) -> tuple[float, int]:
    """Return seconds and number of the slowest stage under the best cuts for an order."""
    count = priced.options.counts(priced.tables)[-1]
    depths = in_flight("1f1b", len(order), count)
    bare = Proposal((), single_device_groups(order), "1f1b", count, depths)
    best = float("inf"), 0
    costs = priced.costs(bare)
    matrices = [
        group_matrix(costs, bare.groups, stage, depths[stage], "sum", count)
        for stage in range(len(order))
    ]
    for cuts in best_cuts(priced, bare):
        times_s = stage_times(matrices, cuts)
        best = min(best, (max(times_s), times_s.index(max(times_s))))
    return best
