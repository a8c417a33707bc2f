"""Auto: prices the proposals of all planners, and improves the best plan by a local search.

For up to `FREE_ORDER_DEVICES` devices it also tries all sequences of stages, each on one device or
on replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from itertools import combinations

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable
from hetpipe.errors import HetpipeError
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import check_members, fastest_plan, finish_plan
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import Groups, PlannerOptions, Proposal, Tables
from hetpipe.plan.search import FREE_ORDER_DEVICES, improve_plan, propose_partitions

OTHERS = ("exact", "bapipe", "dapple", "pipedream")
FEW = 16
"""Up to this number of devices the planner tries the fastest 1, 2, 3, ... devices; with more
devices, the fastest half, quarter, ..."""


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions) -> Plan:
    """Return the fastest predicted plan of all planners. Raises `PlanError`.

    For at most `FREE_ORDER_DEVICES` devices all groups are compared by lower bounds: first stages
    on one device each, then with replicas. Groups that cannot beat earlier proposals are omitted.
    """
    check_members(costs, cluster)
    priced = Priced(costs, options)
    proposed = list(_promising(priced, cluster))
    if len(cluster.ids) <= FREE_ORDER_DEVICES:
        alone, replicated = _all_groups(priced, cluster.ids)
        for several in (alone, replicated):
            limit_s = priced.shortest_s(proposed)
            for groups in several:
                proposed += propose_partitions(priced, groups, limit_s=limit_s)
    best = fastest_plan(priced, proposed, cluster, "auto")
    return finish_plan(improve_plan(best, priced), priced, cluster)


def _promising(priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """Yield the other planners' proposals, proposals on only the fastest devices, data parallelism,
    and proposals with replicas of one kind."""
    for name in OTHERS:
        other = import_module(f"hetpipe.plan.planners.{name}")
        try:
            yield from list(other.proposals(priced, cluster))
        except HetpipeError:
            continue  # a planner that cannot plan here proposes nothing
    yield from _fastest(priced, cluster)
    if priced.options.replicas:
        yield from _replicated(priced, cluster.ids)
        yield from _in_kinds(priced, cluster.ids)


def _fastest(priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """Yield proposals with a stage on each of the k fastest devices, in the cluster's order."""
    speeds_s = _whole_s(priced, cluster.ids)
    by_speed = sorted(cluster.ids, key=speeds_s.__getitem__)
    count = len(by_speed)
    sizes = set(range(1, count)) if count <= FEW else {count >> shift for shift in range(1, 7)}
    for size in sorted(sizes - {0}):
        chosen = set(by_speed[:size])
        yield from propose_partitions(
            priced, tuple((member,) for member in cluster.ids if member in chosen)
        )


def _whole_s(priced: Priced, members: Sequence[str]) -> dict[str, float]:
    """Return the seconds of the whole model's forward on each device."""
    table = priced.tables[max(priced.tables)]
    return {m: sum(one.forward_s for one in table.devices[m].layers) for m in members}


def _replicated(priced: Priced, members: Sequence[str]) -> Iterator[Proposal]:
    """Yield data parallelism on all devices, and on the fastest half, quarter, ... of them."""
    if not priced.options.data_parallel:
        return
    by_speed = sorted(members, key=_whole_s(priced, members).__getitem__)
    counts = {len(members) >> shift for shift in range(len(members).bit_length())}
    for count in sorted(counts - {0, 1}, reverse=True):
        rows = priced.options.mini_batch // count
        for microbatches in priced.options.microbatches or [2**k for k in range(rows.bit_length())]:
            yield Proposal((), (tuple(by_speed[:count]),), "data-parallel", microbatches)


def _in_kinds(priced: Priced, members: Sequence[str]) -> Iterator[Proposal]:
    """Yield proposals in which each stage is on 2, 4, 8, ... replicas of one kind (equal times).

    Kinds are in the cluster's order. The last stage of a kind has the remaining devices.
    """
    table = priced.tables[max(priced.tables)]
    kinds: dict[float, list[str]] = {}
    for member in members:
        kinds.setdefault(sum(one.forward_s for one in table.devices[member].layers), []).append(
            member
        )
    most = max(map(len, kinds.values()))
    for replicas in (2**k for k in range(1, most.bit_length())):
        groups = tuple(
            tuple(kind[first : first + replicas])
            for kind in kinds.values()
            for first in range(0, len(kind), replicas)
        )
        yield from propose_partitions(priced, groups)


def _all_groups(priced: Priced, members: Sequence[str]) -> tuple[list[Groups], list[Groups]]:
    """Return all sequences of disjoint groups of members: first the sequences with one member per
    group, then all others. If two sequences differ only by an exchange of equal members, the second
    sequence is omitted."""
    kinds = _kinds(priced.tables, members)
    found: dict[tuple[tuple[int, ...], ...], Groups] = {}
    for size in range(1, len(members) + 1):
        for subset in combinations(members, size):
            for groups in _sequences(subset):
                in_order = sorted(groups, key=lambda group: members.index(group[0]))
                if priced.options.free_order or list(groups) == in_order:
                    kind = tuple(tuple(sorted(kinds[each] for each in group)) for group in groups)
                    found.setdefault(kind, groups)
    alone = [groups for groups in found.values() if max(map(len, groups)) == 1]
    others = [groups for groups in found.values() if max(map(len, groups)) > 1]
    return alone, others if priced.options.replicas else []


def _kinds(tables: Tables, members: Sequence[str]) -> dict[str, int]:
    """Return a number for each member; members with equal costs and links have equal numbers."""
    kinds: dict[str, int] = {}
    for number, member in enumerate(members):
        equal = (
            other
            for other in members[:number]
            if all(_are_equal(table, member, other, members) for table in tables.values())
        )
        kinds[member] = kinds.get(next(equal, ""), number)
    return kinds


def _are_equal(table: CostTable, one: str, other: str, members: Sequence[str]) -> bool:
    """Whether an exchange of two members changes no cost."""
    here, there = table.devices[one], table.devices[other]
    if replace(here, memory_domain="") != replace(there, memory_domain=""):
        return False
    shared = {table.devices[member].memory_domain for member in members if member != one}
    if here.memory_domain != there.memory_domain and here.memory_domain in shared:
        return False
    return table.link(one, other) == table.link(other, one) and all(
        table.link(one, member) == table.link(other, member)
        and table.link(member, one) == table.link(member, other)
        for member in members
        if member not in (one, other)
    )


def _sequences(members: Sequence[str]) -> Iterator[Groups]:
    """Yield all sequences of disjoint groups that contain all members."""
    if not members:
        yield ()
        return
    for size in range(1, len(members) + 1):
        for first in combinations(members, size):
            rest = [member for member in members if member not in first]
            for others in _sequences(rest):
                yield (first, *others)
