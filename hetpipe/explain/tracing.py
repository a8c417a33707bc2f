"""Tracing: the facts about a plan for the events of a trace."""

from __future__ import annotations

from hetpipe.explain.page import layers_of
from hetpipe.plan.plan import Plan
from hetpipe.plan.simulation import Simulation
from hetpipe.report.trace import Details


def details_of(plan: Plan, simulation: Simulation | None) -> Details:
    """Return layers, bytes of cuts, and predicted memory if there is a simulation."""
    layers = [layers_of(plan, number) for number in range(len(plan.stages))]
    if simulation is None:
        return Details(layers, plan.cut_nbytes)
    outcome = simulation.outcome
    memory = dict(zip(outcome.workers, outcome.memory, strict=True))
    return Details(layers, plan.cut_nbytes, memory)
