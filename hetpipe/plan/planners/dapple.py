"""DAPPLE: a pivot stage, three placement policies, replicas that divide micro-batches (section 4).

The paper's devices are equal, so unlike ones count by their mean times. Its formula picks a few
plans for each size of micro-batch; the prediction chooses among these and their depths, P_A and
P_B.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.plan.chain import chain_of
from hetpipe.plan.dapple import candidates
from hetpipe.plan.placement import Machines, Wire
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import chosen
from hetpipe.plan.proposal import PlannerOptions, Priced, Proposal, Tables, grouped
from hetpipe.plan.search import is_large, worth_trying
from hetpipe.schedule.rule import rule_of
from hetpipe.words import words

FLUSHING = ("1f1b",)
COUNTS = 3
"""Sizes of micro-batches for which the formula is solved; the paper has one, its profile's."""
CANDIDATES, FEW_CANDIDATES = 8, 2
"""Plans of the formula that are simulated, by size of micro-batch; and where each takes long."""


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions) -> Plan:
    """The quickest of DAPPLE's plans. Raises `PlanError`."""
    return chosen("dapple", proposals, costs, cluster, options)


def proposals(priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """The formula's best plans, data parallelism and a straight pipeline among them."""
    options = priced.options
    if not options.replicas:
        raise PlanError("the planner dapple replicates stages: allow replicas, or take another")
    if not any(rule_of(schedule).flushes for schedule in options.among(FLUSHING)):
        raise PlanError(
            f"the planner dapple is for schedules that flush, not for {words(options.schedules)}: "
            "choose another schedule, or another planner"
        )
    members = tuple(id for group in cluster.groups() for id in group)
    few = is_large(priced, grouped(members))
    counts = worth_trying(priced, grouped(members))
    for count in counts[:: max(1, len(counts) // COUNTS)]:
        size = options.size(count)
        table = priced.table(size).beside(len(members))
        plans = candidates(
            chain_of(table, members), machines_of(table, cluster), samples=size,
            global_batch=size * count, count=FEW_CANDIDATES if few else CANDIDATES,
            capacity_nbytes=min(table.devices[member].memory_nbytes for member in members),
        )  # fmt: skip
        for each in plans:
            groups = tuple(tuple(members[n] for n in stage.devices) for stage in each.stages)
            cuts = tuple(stage.first_layer for stage in each.stages[1:])
            if len(groups) == 1 and len(groups[0]) > 1:
                yield Proposal(cuts, groups, "data-parallel", count)
                continue
            for schedule in options.among(FLUSHING):
                rule = rule_of(schedule)
                if not rule.flushes or rule.several_stages:
                    continue
                for depth in ("P_A", "P_B") if rule.any_depth else ():
                    yield Proposal(cuts, groups, schedule, count, each.in_flight(depth))
                if not rule.any_depth:
                    yield Proposal(cuts, groups, schedule, count)


def machines_of(table: CostTable, cluster: Cluster) -> Machines:
    """The cluster's servers, with the slowest link inside one and between two."""
    groups = cluster.groups()
    inside = [(a, b) for group in groups for a in group for b in group if a != b]
    heads = [group[0] for group in groups]
    between = [(a, b) for a in heads for b in heads if a != b]
    return Machines(tuple(map(len, groups)), _wire(table, inside), _wire(table, between))


def _wire(table: CostTable, pairs: list[tuple[str, str]]) -> Wire:
    """The slowest of these links; without any, one that costs nothing."""
    links = [table.link(*pair) for pair in pairs]
    return Wire(
        min((link.bandwidth_Bps for link in links), default=inf),
        min((link.sum_Bps for link in links), default=inf),
        max((link.latency_s for link in links), default=0.0),
    )
