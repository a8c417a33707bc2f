"""Exact: the partition whose slowest stage is fastest, for the cluster's order and better orders.

There is one stage on each device. For a fixed order of devices the partition is optimal
(`hetpipe.plan.partition`). Other orders come from exchanges of two devices while these make the
slowest stage faster and, if the devices are of few types, from the search `free_order`.

In this search transfers do not count, so only the number of devices of each type matters. The
farthest cut that p devices of one type and q devices of another type can reach within a time limit
follows from the farthest cuts of one device fewer. The limit is bisected until no partition is
faster than the best one; devices may be left out. (Algorithm of section 7 in Benoit, Rehn-Sonigo,
Robert 2007 for few types; the general problem is NP-complete.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hetpipe.cluster.cluster import Cluster
from hetpipe.errors import PlanError
from hetpipe.plan.bisection import ROUNDING, STRICTLY, bisect_limit
from hetpipe.plan.costs import Array
from hetpipe.plan.groups import group_matrix
from hetpipe.plan.partition import stage_times
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import chosen
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, Tables, in_flight, single_device_groups
from hetpipe.plan.search import best_cuts, is_large, propose_partitions, worth_trying

STATES = 2**16  # the best order is computed for at most this many combinations of counts
EXCHANGES = 60  # at most this many exchanges of devices are tried


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
    """Return the order that would be best if transfers cost nothing. It omits members that make
    nothing faster. If there are too many kinds of members, return the given order."""
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
    """Return the given order and, if the options allow other orders, the order after exchanges.

    With many layers the order of devices matters little, so large cases have only the given order.
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
    """Return the order after exchanges of the slowest stage's device. Each exchange makes the
    slowest stage faster."""
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


@dataclass(frozen=True, eq=False)
class DeviceType:
    """`count` equal devices. `layers_s` has the seconds of each layer, infinite for a layer that
    these devices cannot run. A stage takes `overhead_s` in addition.

    Raises `PlanError` for numbers below 0.
    """

    name: str
    count: int
    layers_s: Array
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        values = [np.array([self.count, self.overhead_s]), self.layers_s]
        for name, each in zip(("count or overhead_s", "layers_s"), values, strict=True):
            if not (each >= 0).all():
                raise PlanError(f"{self.name} has {name} {each.min()}: give 0 or more")


@dataclass(frozen=True)
class TypedStage:
    """Layers `lo` to `hi` (excluded) on a device whose type has the index `kind`."""

    kind: int
    lo: int
    hi: int


def free_order(types: Sequence[DeviceType]) -> tuple[float, tuple[TypedStage, ...]] | None:
    """Return the partition whose slowest stage is fastest over all orders of devices: the seconds
    of this stage, and the stages. None if the devices cannot run all layers.

    The search takes time in proportion to the product of the counts. Raises `PlanError` if there
    are no devices, or if types have different numbers of layers.
    """
    search = _Search(types)
    best = search.within(search.most_s)
    if best is None:
        return None
    rounding_s = ROUNDING * search.most_s
    return bisect_limit(
        best, search.least_s(), search.within, search.slowest_s, rounding_s, _middle_s
    )


def _middle_s(low_s: float, high_s: float) -> float:
    """Return the mean of two limits; the geometric mean if the limits are far apart."""
    return math.sqrt(low_s * high_s) if 0 < low_s < high_s / 2 else (low_s + high_s) / 2


class _Search:
    """Finds the farthest cuts by counts of devices, for one limit after another."""

    def __init__(self, types: Sequence[DeviceType]) -> None:
        if not any(kind.count for kind in types):
            raise PlanError(f"{len(types)} types with 0 devices: give one device or more")
        self.types = types
        self.layers = len(types[0].layers_s)
        for kind in types:
            if len(kind.layers_s) != self.layers:
                raise PlanError(
                    f"{kind.name} has {len(kind.layers_s)} layers: give {self.layers} layers"
                )
        able = [np.isfinite(kind.layers_s) for kind in types]
        self.seconds = [
            _sums(np.where(runs, kind.layers_s, 0.0))
            for kind, runs in zip(types, able, strict=True)
        ]
        self.unable = [_sums(~runs) for runs in able]
        self.most_s = max(
            kind.overhead_s + float(sums[-1])
            for kind, sums in zip(types, self.seconds, strict=True)
        )
        self.levels = _levels([kind.count for kind in types])

    def least_s(self) -> float:
        """Return a lower bound of the slowest stage: the layers' least times, summed, divided by
        the number of devices."""
        quickest_s = np.min([kind.layers_s for kind in self.types if kind.count], axis=0)
        return float(quickest_s.sum() / sum(kind.count for kind in self.types)) * STRICTLY

    def slowest_s(self, stages: Sequence[TypedStage]) -> float:
        """Return the seconds of the slowest stage of a partition."""
        return max(
            self.types[stage.kind].overhead_s
            + float(self.seconds[stage.kind][stage.hi] - self.seconds[stage.kind][stage.lo])
            for stage in stages
        )

    def within(self, limit_s: float) -> tuple[TypedStage, ...] | None:
        """Return a partition whose stages meet `limit_s`; None if there is none."""
        reach = [self._reach(n, limit_s) for n in range(len(self.types))]
        farthest = [np.array([0, self.layers + 1])]  # by level; the last entry stands for no state
        for parents in self.levels:
            most = np.full(len(parents[0]) + 1, self.layers + 1)
            most[:-1] = reach[0][farthest[-1][parents[0]]]
            for n, states in enumerate(parents[1:], 1):
                np.maximum(most[:-1], reach[n][farthest[-1][states]], out=most[:-1])
            farthest.append(most)
        if farthest[-1][0] < self.layers:
            return None
        state, stages = 0, []
        for level in range(len(self.levels), 0, -1):
            hi = int(farthest[level][state])
            for n, parents in enumerate(self.levels[level - 1]):
                lo = int(farthest[level - 1][parents[state]])
                if reach[n][lo] == hi and lo <= self.layers:
                    break
            if lo < hi:
                stages.append(TypedStage(n, lo, hi))
            state = int(self.levels[level - 1][n][state])
        return tuple(reversed(stages))

    def _reach(self, kind: int, limit_s: float) -> Array:
        """Return, by cut, the farthest cut that one more device of a type can reach from there; the
        cut itself if the device can run no further layer."""
        own, seconds = self.types[kind], self.seconds[kind]
        cuts = np.arange(self.layers + 1)
        # By a rounding error, a stage of exactly this limit may seem to exceed it.
        room_s = (limit_s - own.overhead_s) * (1 + 1e-14)
        last = seconds.searchsorted(seconds + room_s, "right") - 1
        able = self.unable[kind].searchsorted(self.unable[kind], "right") - 1
        ends = np.minimum(last, able)  # before the cut if the overhead alone exceeds the limit
        return np.append(np.maximum(cuts, ends), 0)  # the last entry: a missing state reaches 0


def _levels(counts: Sequence[int]) -> list[list[Array]]:
    """Return the states by level. A state is a count of devices for each type; level n has n
    devices.

    A level has an array for each type, with an entry for each state of the level. The entry is the
    index, in the previous level, of the state with one device of this type fewer. If there is no
    such state it is -1, the index of the last entry that `within` adds.
    """
    states = np.indices([count + 1 for count in counts]).reshape(len(counts), -1)
    totals = states.sum(axis=0)
    place = np.empty(len(totals), np.int64)
    order = np.argsort(totals, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(totals))[:-1])
    for group in groups:
        place[group] = np.arange(len(group))
    strides = [int(np.prod([count + 1 for count in counts[n + 1 :]])) for n in range(len(counts))]
    return [
        [np.where(states[n][group] > 0, place[group - strides[n]], -1) for n in range(len(counts))]
        for group in groups[1:]
    ]


def _sums(values: Array) -> Array:
    return np.concatenate(([0.0], np.cumsum(values)))
