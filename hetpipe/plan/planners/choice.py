"""Choice: finds a planner by name, and chooses among the proposals of any planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module

from hetpipe.cluster.cluster import Cluster
from hetpipe.errors import PlanError
from hetpipe.plan.bound import lower_bound_s
from hetpipe.plan.cures import why_not
from hetpipe.plan.interval import with_interval
from hetpipe.plan.limits import MISSING, why_unrunnable
from hetpipe.plan.plan import Plan
from hetpipe.plan.priced import Priced
from hetpipe.plan.pricing import predicted_step_s, stage_times
from hetpipe.plan.proposal import PlannerOptions, Proposal, Tables, nearest_table
from hetpipe.words import choices, words

WORTH_A_NOTE = 0.01  # a note mentions shared links that make the step longer by a larger share

PLANNERS = ("auto", "bapipe", "dapple", "exact", "pipedream")  # modules of this folder

Proposals = Callable[[Priced, Cluster], Iterable[Proposal]]


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions, planner: str = "auto") -> Plan:
    """Return the plan of the planner with this name. Raises `PlanError`; see `chosen`."""
    check_planner(planner)
    made: Plan = import_module(f"hetpipe.plan.planners.{planner}").plan(costs, cluster, options)
    return made


def check_planner(name: str, known: Sequence[str] = PLANNERS) -> None:
    """Raise `PlanError` unless the name is among the known ones."""
    if name not in known:
        raise PlanError(f"no planner {name!r}; {choices(name, known)}")


def chosen(
    planner: str, proposals: Proposals, costs: Tables, cluster: Cluster, options: PlannerOptions
) -> Plan:
    """Return the fastest predicted plan of the proposals, with its interval and lower bound.

    `costs` are by micro-batch size, for all members of the cluster and the links between them.
    Raises `PlanError` for members without costs, or if no proposal can run.
    """
    check_members(costs, cluster)
    priced = Priced(costs, options)
    best = fastest_plan(priced, proposals(priced, cluster), cluster, planner)
    return finish_plan(best, priced, cluster)


def fastest_plan(
    priced: Priced, proposed: Iterable[Proposal], cluster: Cluster, planner: str
) -> Plan:
    """Return the fastest plan of the proposals. Raises `PlanError` with a cure if none can run."""
    proposed = list(proposed)
    try:
        return priced.quickest(proposed, planner)
    except PlanError as error:
        if proposed and MISSING not in str(error):
            raise
        raise PlanError(
            f"no plan of {planner} for {words(cluster.ids)}: {why_not(priced, cluster.ids)}"
        ) from error


def finish_plan(best: Plan, priced: Priced, cluster: Cluster) -> Plan:
    """Return the plan with its interval, the lower bound for all plans on the cluster, and a note
    if shared links slow down its messages and sums."""
    bound_s = lower_bound_s(priced.tables, cluster.ids, priced.options)
    notes = *best.notes, *_on_shared_links(best, priced, cluster)
    best = replace(best, lower_bound_s=bound_s, notes=notes)
    return with_interval(best, nearest_table(priced.tables, best))


def _on_shared_links(best: Plan, priced: Priced, cluster: Cluster) -> Iterator[str]:
    """Yield a note if the step is longer because messages and sums share the cluster's links."""
    size = priced.options.size(best.microbatches)
    table = priced.table(min(max(size, min(priced.tables)), max(priced.tables)))
    shared = stage_times(best, table, as_planned=True, cluster=cluster)
    if not shared.shares_media:
        return
    step_s = predicted_step_s(best, table, shared)
    if step_s > (1 + WORTH_A_NOTE) * best.step_s:
        yield (
            f"the step is {1e3 * step_s:.2f} ms where messages and sums over replicas share the "
            "cluster's buses, half-duplex links and uplinks; plans are compared as if each pair of "
            "devices had its own link"
        )


def check_members(costs: Tables, cluster: Cluster) -> None:
    """Raise `PlanError` for a member without costs, and for a layer that no member can run."""
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
