"""Plans of which everything is given but the costs, which nobody has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

from hetpipe.cost.table import CostTable, DeviceCost, Label, LayerBytes, LayerCost, LinkCost

if TYPE_CHECKING:
    from hetpipe.capture.layers import LayerGraph
    from hetpipe.plan.plan import Plan

NOTE = "nothing was measured for this plan, so its times and memory are unknown"
ENDLESS_NBYTES = 1 << 62


def free_table(model: str, graph: LayerGraph, devices: Sequence[str], label: Label) -> CostTable:
    """Costs of 0 for all layers on all devices, and memory without end."""
    row = DeviceCost((LayerCost(0.0, 0.0, 0.0),) * len(graph), 0.0, ENDLESS_NBYTES, "", label=label)
    crossing = (*graph.cut_nbytes, 0)
    layers = tuple(
        LayerBytes(layer.name, 0, 0, 0, nbytes)
        for layer, nbytes in zip(graph.layers, crossing, strict=True)
    )
    links = dict.fromkeys(permutations(devices, 2), LinkCost(0.0, float("inf")))
    return CostTable(model, graph.samples, layers, dict.fromkeys(devices, row), links)


def without_price(plan: Plan) -> Plan:
    """A plan made by a `free_table`, which says that its costs are unknown."""
    stages = tuple(replace(stage, capacity_nbytes=0) for stage in plan.stages)
    return replace(plan, stages=stages, interval_s=None, notes=(NOTE,))
