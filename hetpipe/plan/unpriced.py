"""Plans of which everything is given but the costs, which nobody has measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

from hetpipe.cost.table import CostTable, DeviceCost, Label, LayerBytes, LayerCost, LinkCost
from hetpipe.plan.plan import Plan
from hetpipe.plan.planner import make_plan

if TYPE_CHECKING:
    from hetpipe.capture.layers import LayerGraph

NOTE = "nothing was measured for this plan, so its times and memory are unknown"
ENDLESS_NBYTES = 1 << 62


def unpriced_plan(
    model: str,
    graph: LayerGraph,
    devices: Sequence[str],
    cuts: Sequence[int],
    *,
    mini_batch: int,
    microbatches: int,
    schedule: str,
    weights: str,
    label: Label,
) -> Plan:
    """The plan with these stages, whose times and bytes of memory are 0. Raises `PlanError`.

    Speeds that will be measured with it have this label.
    """
    free = LayerCost(0.0, 0.0, 0.0)
    row = DeviceCost((free,) * len(graph), 0.0, ENDLESS_NBYTES, memory_domain="", label=label)
    crossing = (*graph.cut_nbytes, 0)
    layers = tuple(
        LayerBytes(layer.name, 0, 0, 0, nbytes)
        for layer, nbytes in zip(graph.layers, crossing, strict=True)
    )
    table = CostTable(
        model,
        graph.samples,
        layers,
        dict.fromkeys(devices, row),
        dict.fromkeys(permutations(devices, 2), LinkCost(0.0, float("inf"))),
    )
    plan = make_plan(
        table, devices, mini_batch=mini_batch, microbatches=microbatches, schedule=schedule,
        weights=weights, cuts=cuts,
    )  # fmt: skip
    stages = tuple(replace(stage, capacity_nbytes=0) for stage in plan.stages)
    return replace(plan, stages=stages, notes=(NOTE,))
