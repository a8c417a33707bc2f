"""Plans of a subject for a cluster."""

from __future__ import annotations

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable
from hetpipe.plan.intra import split_table
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.registry import plan as planned
from hetpipe.plan.proposal import PlannerOptions, Priced
from hetpipe.study.subject import Subject, sizes_of


def plan(
    subject: Subject,
    cluster: Cluster,
    options: PlannerOptions | None = None,
    planner: str = "auto",
) -> tuple[Plan, CostTable]:
    """Return the plan of a planner, and the costs at its micro-batches. Raises `HetpipeError`."""
    options = options or subject.options()
    tables = subject.costs(cluster, sizes_of(options.mini_batch))
    chosen = planned(tables, cluster, options, planner)
    return chosen, costs_for(Priced(tables, options), chosen)


def costs_for(priced: Priced, plan: Plan) -> CostTable:
    """Return the costs at a plan's micro-batches, or at the nearest known size."""
    size = priced.options.size(plan.microbatches)
    least, most = min(priced.tables), max(priced.tables)
    table = priced.table(min(max(size, least), most))
    for split in plan.splits:
        table = split_table(table, split, priced.options.channels)
    return table
