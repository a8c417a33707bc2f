"""Registry: the planners by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from hetpipe.cluster.cluster import Cluster
from hetpipe.errors import PlanError
from hetpipe.plan.plan import Plan
from hetpipe.plan.proposal import PlannerOptions, Tables

PLANNERS = ("auto", "bapipe", "dapple", "exact", "pipedream")
"""Modules of this folder. `auto` considers the proposals of all others."""

Planner = Callable[[Tables, Cluster, PlannerOptions], Plan]


def planner_of(name: str) -> Planner:
    """Return the planner with this name. Raises `PlanError` for an unknown name."""
    if name not in PLANNERS:
        raise PlanError(f"no planner {name!r}; choose one of {', '.join(PLANNERS)}")
    planner: Planner = import_module(f"hetpipe.plan.planners.{name}").plan
    return planner


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions, planner: str = "auto") -> Plan:
    """Return the plan of a planner, see `planners.choice.chosen`. Raises `PlanError`."""
    return planner_of(planner)(costs, cluster, options)
