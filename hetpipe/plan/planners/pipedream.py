"""PipeDream: stages and their replicas on a hierarchy of equal devices (section 3.1).

The paper's devices are equal, so unlike devices count by their mean times, and stages take them in
the cluster's order. Asynchronous schedules take the mini-batch whole, as the paper does; other
schedules take the same stages with its micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from hetpipe.cluster.cluster import Cluster
from hetpipe.errors import ClusterError, PlanError
from hetpipe.plan.chain import chain_of
from hetpipe.plan.pipedream import Level, PipeDreamStage, SyncRule, plan_pipedream
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import chosen
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, Tables, single_device_groups
from hetpipe.plan.search import is_large, worth_trying
from hetpipe.schedule.rule import rule_of

FLUSHING = ("1f1b",)
RULES: tuple[SyncRule, ...] = ("text", "published-code")


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions) -> Plan:
    """Return the fastest of PipeDream's plans. Raises `PlanError`."""
    return chosen("pipedream", proposals, costs, cluster, options)


def proposals(priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """Yield the plan of each cost rule, for each schedule and number of micro-batches."""
    options = priced.options
    levels = levels_of(priced, cluster)
    if not options.replicas:
        raise PlanError("the planner pipedream replicates stages: allow replicas, or take another")
    large = is_large(priced, single_device_groups(cluster.ids))
    for count in worth_trying(priced, single_device_groups(cluster.ids)):
        schedules = [name for name in options.among(FLUSHING) if _takes(name, count)]
        if not schedules:
            continue
        table = priced.table(options.size(count)).beside(len(cluster.ids))
        chain = chain_of(table, cluster.ids)
        least = min(table.devices[member].memory_nbytes for member in cluster.ids)
        for rule in RULES[:1] if large else RULES:
            for capacity_nbytes in (None,) if large else (None, least):
                try:
                    stages = plan_pipedream(chain, levels, rule, capacity_nbytes).stages
                except PlanError:
                    continue
                cuts, groups = assign_members(stages, cluster.ids)
                alike = options.data_parallel and len(groups) == 1 and len(groups[0]) > 1
                for schedule in schedules:
                    if alike and rule_of(schedule).flushes:
                        schedule = "data-parallel"
                    yield Proposal(cuts, groups, schedule, count)


def levels_of(priced: Priced, cluster: Cluster) -> list[Level]:
    """Return the cluster's levels; one level with the slowest link if it is irregular."""
    try:
        return [Level(count, bandwidth_Bps) for count, bandwidth_Bps in cluster.levels()]
    except ClusterError:
        table = next(iter(priced.tables.values()))
        links = [
            table.link(here, there).bandwidth_Bps
            for here in cluster.ids
            for there in cluster.ids
            if here != there
        ]
        return [Level(len(cluster.ids), min(links, default=float("inf")))]


def assign_members(
    stages: Sequence[PipeDreamStage], members: Sequence[str]
) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]:
    """Return the cuts, and the members of each stage, in order."""
    names = iter(members)
    groups = tuple(tuple(islice(names, stage.replicas)) for stage in stages)
    return tuple(stage.first_layer for stage in stages[1:]), groups


def _takes(schedule: str, microbatches: int) -> bool:
    """Whether stages with replicas can run under the schedule, with these micro-batches."""
    rule = rule_of(schedule)
    if rule.several_stages or not rule.averages:
        return False
    return rule.flushes or microbatches == 1
