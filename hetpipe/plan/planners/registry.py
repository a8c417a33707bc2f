"""The planners by name."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from hetpipe.cluster.cluster import Cluster
from hetpipe.errors import PlanError
from hetpipe.plan.plan import Plan
from hetpipe.plan.proposal import PlannerOptions, Tables

PLANNERS = ("auto", "bapipe", "dapple", "exact", "pipedream")
"""Modules of this folder. `auto` weighs what all the others propose."""

Planner = Callable[[Tables, Cluster, PlannerOptions], Plan]


def planner_of(name: str) -> Planner:
    """The planner of that name. Raises `PlanError` for an unknown one."""
    if name not in PLANNERS:
        raise PlanError(f"no planner {name!r}; choose one of {', '.join(PLANNERS)}")
    planner: Planner = import_module(f"hetpipe.plan.planners.{name}").plan
    return planner


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions, planner: str = "auto") -> Plan:
    """The plan of the planner of that name, see `planners.choice.chosen`. Raises `PlanError`."""
    return planner_of(planner)(costs, cluster, options)
