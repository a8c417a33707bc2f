"""Plans without prices: the user decides everything, and nobody has measured costs."""

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
    """Return a table with zero costs for all layers on all devices, and unlimited memory."""
    row = DeviceCost((LayerCost(0.0, 0.0, 0.0),) * len(graph), 0.0, ENDLESS_NBYTES, "", label=label)
    crossing = (*graph.cut_nbytes, 0)
    layers = tuple(
        LayerBytes(layer.name, 0, 0, 0, nbytes)
        for layer, nbytes in zip(graph.layers, crossing, strict=True)
    )
    links = dict.fromkeys(permutations(devices, 2), LinkCost(0.0, float("inf")))
    return CostTable(model, graph.samples, layers, dict.fromkeys(devices, row), links)


def without_price(plan: Plan) -> Plan:
    """Return a plan of a `free_table` with unknown costs."""
    stages = tuple(replace(stage, capacity_nbytes=0) for stage in plan.stages)
    return replace(plan, stages=stages, interval_s=None, notes=(NOTE,))
