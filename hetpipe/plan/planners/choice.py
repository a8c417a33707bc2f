"""The choice among proposals, which is the same for all planners."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from hetpipe.cluster.cluster import Cluster
from hetpipe.errors import PlanError
from hetpipe.plan.bound import lower_bound_s
from hetpipe.plan.cures import why_not
from hetpipe.plan.interval import with_interval
from hetpipe.plan.plan import Plan
from hetpipe.plan.pricing import why_unrunnable
from hetpipe.plan.proposal import PlannerOptions, Priced, Proposal, Tables
from hetpipe.words import words

Proposals = Callable[[Priced, Cluster], Iterable[Proposal]]


def chosen(
    planner: str, proposals: Proposals, costs: Tables, cluster: Cluster, options: PlannerOptions
) -> Plan:
    """The quickest predicted plan among the proposals, with its interval and lower bound.

    `costs` are by micro-batch size, of all members of the cluster and the links between them.
    Raises `PlanError` for members without costs, or if no proposal can run.
    """
    check_members(costs, cluster)
    priced = Priced(costs, options)
    return finished(quickest(priced, proposals(priced, cluster), cluster, planner), priced, cluster)


def quickest(priced: Priced, proposed: Iterable[Proposal], cluster: Cluster, planner: str) -> Plan:
    """The quickest plan of the proposals. Raises `PlanError` with a cure if none can run."""
    proposed = list(proposed)
    try:
        return priced.quickest(proposed, planner)
    except PlanError as error:
        if proposed and "lacking" not in str(error):
            raise
        raise PlanError(
            f"no plan of {planner} for {words(cluster.ids)}: {why_not(priced, cluster.ids)}"
        ) from error


def finished(best: Plan, priced: Priced, cluster: Cluster) -> Plan:
    """The plan with its interval, and the lower bound of all plans on the cluster."""
    nearest = min(priced.tables, key=lambda size: abs(size - best.share_samples))
    bound_s = lower_bound_s(priced.tables, cluster.ids, priced.options)
    return with_interval(replace(best, lower_bound_s=bound_s), priced.tables[nearest])


def check_members(costs: Tables, cluster: Cluster) -> None:
    """Raises `PlanError` for a member without costs, and for a layer that no member can run."""
    if not costs:
        raise PlanError("there are no costs to plan by; profile the model, or describe the devices")
    for size, table in costs.items():
        for member in cluster.ids:
            if member not in table.devices:
                raise PlanError(
                    f"no costs for {member} at micro-batches of {size}; profile it, or describe it"
                )
        why = why_unrunnable(table, cluster.ids)
        if why is not None:
            raise PlanError(f"no plan for {words(cluster.ids)}: {why}")
