"""Auto: the proposals of all planners, and a search that begins with the best of them.

On few devices every order of them in stages, alone or as replicas, is a beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import combinations

from hetpipe.cluster.cluster import Cluster
from hetpipe.errors import HetpipeError
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import check_members, finished
from hetpipe.plan.proposal import PlannerOptions, Priced, Proposal, Tables
from hetpipe.plan.search import improved, partitioned
from hetpipe.schedule.rule import rule_of

OTHERS = ("exact", "bapipe")
FREE_ORDER_DEVICES = 4
"""Up to this number of devices all orders, subsets and groups are tried."""

Groups = tuple[tuple[str, ...], ...]


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions) -> Plan:
    """The quickest predicted plan of all. Raises `PlanError`."""
    check_members(costs, cluster)
    priced = Priced(costs, options)
    best = priced.quickest(proposals(priced, cluster), "auto")
    return finished(improved(best, priced), priced, cluster)


def proposals(priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """What the other planners propose, each device alone, and groups of few devices."""
    for name in OTHERS:
        other = import_module(f"hetpipe.plan.planners.{name}")
        try:
            yield from list(other.proposals(priced, cluster))
        except HetpipeError:
            continue  # a planner that cannot plan here proposes nothing
    yield from _alone(priced, cluster)
    if priced.options.replicas:
        yield from _replicated(priced, cluster.ids)
    if len(cluster.ids) <= FREE_ORDER_DEVICES:
        for groups in _all_groups(cluster.ids, priced.options):
            yield from partitioned(priced, groups)


def _alone(priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """The whole model on the quickest device of each kind, that is, of each time."""
    kinds: dict[float, str] = {}
    table = priced.tables[max(priced.tables)]
    for member in cluster.ids:
        kinds.setdefault(sum(one.forward_s for one in table.devices[member].layers), member)
    for member in kinds.values():
        yield from partitioned(priced, ((member,),))


def _replicated(priced: Priced, members: Sequence[str]) -> Iterator[Proposal]:
    """Data parallelism on all devices, and on all but the slowest."""
    table = priced.tables[max(priced.tables)]
    by_speed = sorted(
        members, key=lambda member: sum(one.forward_s for one in table.devices[member].layers)
    )
    counts = {len(members) >> shift for shift in range(len(members).bit_length())}
    for count in sorted(counts - {0, 1}, reverse=True):
        for microbatches in priced.options.counts(priced.tables):
            yield Proposal((), (tuple(by_speed[:count]),), "data-parallel", microbatches)


def _all_groups(members: Sequence[str], options: PlannerOptions) -> Iterator[Groups]:
    """All sequences of disjoint groups of some members."""
    for size in range(1, len(members) + 1):
        for subset in combinations(members, size):
            for groups in _sequences(subset):
                alone = all(len(group) == 1 for group in groups)
                in_order = sorted(groups, key=lambda group: members.index(group[0]))
                if (alone or options.replicas) and (options.free_order or list(groups) == in_order):
                    yield groups


def _sequences(members: Sequence[str]) -> Iterator[Groups]:
    """All sequences of disjoint groups that have all of the members."""
    if not members:
        yield ()
        return
    for size in range(1, len(members) + 1):
        for first in combinations(members, size):
            rest = [member for member in members if member not in first]
            for others in _sequences(rest):
                yield (first, *others)


def takes_stages(schedule: str) -> bool:
    """Whether a schedule runs one stage on each group of devices."""
    rule = rule_of(schedule)
    return not rule.several_stages and rule.averages
