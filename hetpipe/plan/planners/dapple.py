"""DAPPLE: a pivot stage, three placement policies, replicas that divide micro-batches (section 4).

The paper's devices are equal, so unlike devices count by their mean times. The paper's formula and
the authors' published program each choose some partitions for some numbers of micro-batches.
hetpipe prices each of these partitions at two depths: P_A, the schedule's usual depth, and P_B,
which has more forwards in flight. The fastest partition is then priced with all numbers of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations
from math import inf

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.links import slowest_pairs
from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.plan.chain import chain_of
from hetpipe.plan.dapple import candidates
from hetpipe.plan.latency import published_plans
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import check_members, fastest_plan, finish_plan
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import (
    PlannerOptions,
    Proposal,
    Tables,
    deep_in_flight,
    in_flight,
    single_device_groups,
)
from hetpipe.plan.search import is_large, worth_trying
from hetpipe.plan.server_groups import Machines, Wire
from hetpipe.schedule.rule import rule_of
from hetpipe.words import words

FLUSHING = ("1f1b",)
SEARCHED = 4
"""The search tries at most this many numbers of micro-batches."""
CANDIDATES, FEW_CANDIDATES = 8, 2
"""How many plans of the formula are priced per number of micro-batches; and how many if each price
takes long."""
PUBLISHED = 2  # plans of the published program that are priced per number of micro-batches

Shape = tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]  # cuts, the devices of each stage


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions) -> Plan:
    """Return the fastest of DAPPLE's plans. Raises `PlanError`."""
    check_members(costs, cluster)
    priced = Priced(costs, options)
    best = fastest_plan(priced, proposals(priced, cluster), cluster, "dapple")
    shape = best.cuts, tuple(stage.devices for stage in best.stages)
    if best.schedule == "data-parallel":
        shape = (), shape[1][:1]
    others = _with_counts(options, shape, options.counts(priced.tables))
    return finish_plan(fastest_plan(priced, others, cluster, "dapple"), priced, cluster)


def proposals(priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """Yield the best plans of the published program and of the formula (see `candidates`)."""
    options = priced.options
    if not options.replicas:
        raise PlanError(
            "the planner dapple replicates stages: allow replicas, or name another planner"
        )
    if not any(rule_of(schedule).flushes for schedule in options.among(FLUSHING)):
        raise PlanError(
            f"the planner dapple is for schedules that flush, not for {words(options.schedules)}: "
            "choose another schedule, or another planner"
        )
    members = tuple(id for group in cluster.groups() for id in group)
    counts = worth_trying(priced, single_device_groups(members))
    for count in counts[:: -(-len(counts) // SEARCHED)]:
        for shape in dict.fromkeys(_shapes(priced, cluster, members, count)):
            yield from _with_counts(options, shape, [count])


def _with_counts(
    options: PlannerOptions, shape: Shape, counts: Sequence[int]
) -> Iterator[Proposal]:
    """Yield a shape with each number of micro-batches, at both depths if the rule has any."""
    cuts, groups = shape
    for count in counts:
        if len(groups) == 1 and len(groups[0]) > 1 and options.data_parallel:
            yield Proposal(cuts, groups, "data-parallel", count)
            continue
        for schedule in options.among(FLUSHING):
            rule = rule_of(schedule)
            if not rule.flushes or rule.several_stages:
                continue
            depths = [in_flight(schedule, len(groups), count)]
            if rule.any_depth:
                depths.append(deep_in_flight(len(groups), count))
            for depth in dict.fromkeys(depths):
                yield Proposal(cuts, groups, schedule, count, depth)


def _shapes(
    priced: Priced, cluster: Cluster, members: Sequence[str], count: int
) -> Iterator[Shape]:
    """Yield the shapes of the published program and of the formula, for `count` micro-batches."""
    few = FEW_CANDIDATES if is_large(priced, single_device_groups(members)) else CANDIDATES
    size = priced.options.size(count)
    table = priced.table(size).beside(len(members))
    chain, machines = chain_of(table, members), machines_of(table, cluster)
    whole = size * count
    published = published_plans(chain, machines, samples=size, global_batch=whole)
    for known in published[:PUBLISHED]:
        names = iter(members)
        yield known.cuts, tuple(tuple(islice(names, replicas)) for replicas in known.replicas)
    least = min(table.devices[member].memory_nbytes for member in members)
    priced_so = replace(machines, samples=size)
    try:
        plans = candidates(
            chain, priced_so, samples=size, global_batch=whole, count=few, capacity_nbytes=least
        )
    except PlanError:
        # The formula counts Adam's state, so it may find that nothing fits. Prices count the state
        # of the real optimizer, and the plans of the published program are priced anyway.
        return
    for plan in plans:
        groups = tuple(tuple(members[n] for n in stage.devices) for stage in plan.stages)
        yield tuple(stage.first_layer for stage in plan.stages[1:]), groups


def machines_of(table: CostTable, cluster: Cluster) -> Machines:
    """Return the cluster's servers, and two links: a slowest one inside servers, and one between.

    Links between the first members of servers stand for all links between servers.
    """
    groups = cluster.groups()
    pairs = slowest_pairs(cluster, table.links) or (
        [pair for group in groups for pair in permutations(group, 2)],
        [*permutations([group[0] for group in groups], 2)],
    )
    inside, between = (_wire(table, each) for each in pairs)
    return Machines(tuple(map(len, groups)), inside, between)


def _wire(table: CostTable, pairs: list[tuple[str, str]]) -> Wire:
    """Return a link with the lowest rates and the highest latency of these links.

    Without links, it costs nothing.
    """
    links = [table.link(*pair) for pair in pairs]
    return Wire(
        min((link.bandwidth_Bps for link in links), default=inf),
        min((link.sum_Bps for link in links), default=inf),
        max((link.latency_s for link in links), default=0.0),
    )
