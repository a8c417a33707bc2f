"""Baselines: simple plans with which a balanced plan is compared, priced by the same costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetpipe.cost.table import CostTable, LayerCost, LinkCost
from hetpipe.errors import PlanError
from hetpipe.plan.chain import mean_s
from hetpipe.plan.interval import with_interval
from hetpipe.plan.plan import Plan
from hetpipe.plan.planner import make_pipeline, make_plan
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, proposal_of
from hetpipe.words import choices


def even_plan(
    table: CostTable,
    devices: Sequence[str],
    *,
    mini_batch: int,
    microbatches: int,
    schedule: str = "1f1b",
) -> Plan:
    """Return a plan with equal numbers of layers per device, in the given order.

    If layers remain, the last stages get one layer more, as they keep fewer micro-batches in
    flight. Raises `PlanError` if a device cannot run its layers.
    """
    share, over = divmod(len(table.layers), max(len(devices), 1))
    # With too few layers, make_plan raises.
    more = [max(0, n - len(devices) + over) for n in range(1, len(devices))]
    cuts = [share * n + extra for n, extra in enumerate(more, 1)] if share else None
    plan = make_plan(
        table, devices, mini_batch=mini_batch, microbatches=microbatches, schedule=schedule,
        cuts=cuts,
    )  # fmt: skip
    return replace(plan, origin="even")


def speed_blind_plan(
    table: CostTable,
    devices: Sequence[str],
    *,
    mini_batch: int,
    microbatches: int,
    schedule: str = "1f1b",
) -> Plan:
    """Return the plan whose cuts would be best if all devices were average, with its true price.

    The devices keep their order. Layers that a device cannot run stay impossible there. Raises
    `PlanError` as `make_plan` does.
    """
    for device in devices:
        if device not in table.devices:
            raise PlanError(f"no costs for {device}; {choices(device, table.devices)}")
    blind = make_plan(
        _averaged(table, devices), devices, mini_batch=mini_batch, microbatches=microbatches,
        schedule=schedule, fixed_order=True,
    )  # fmt: skip
    plan = make_plan(
        table, devices, mini_batch=mini_batch, microbatches=microbatches, schedule=schedule,
        cuts=blind.cuts,
    )  # fmt: skip
    return replace(plan, origin="speed-blind")


def link_blind_plan(
    tables: Mapping[int, CostTable],
    devices: Sequence[str],
    *,
    mini_batch: int,
    schedules: Sequence[str] = ("gpipe", "1f1b"),
) -> Plan:
    """Return the plan on all `devices` that would be best if transfers cost nothing, with its true
    price.

    `tables` are by micro-batch size. Raises `PlanError` as `make_pipeline` does.
    """
    free = {
        size: replace(table, links=dict.fromkeys(table.links, LinkCost(0.0, math.inf)))
        for size, table in tables.items()
    }
    options = PlannerOptions(mini_batch, schedules=tuple(schedules))
    blind = make_pipeline(free, devices, options)
    plan = Priced(tables, options).plan(proposal_of(blind), "link-blind")
    return with_interval(plan, tables[plan.share_samples].beside(len(devices)))


def _averaged(table: CostTable, devices: Sequence[str]) -> CostTable:
    """Return the table in which all `devices` have the layers' mean times (see `chain_of`)."""
    costs = [table.devices[device] for device in devices]
    overhead_s = sum(cost.overhead_s for cost in costs) / len(costs)
    means = [
        LayerCost(
            mean_s([entry.forward_s for entry in entries]),
            mean_s([entry.backward_s for entry in entries]),
            mean_s([entry.update_s for entry in entries]),
        )
        for entries in zip(*(cost.layers for cost in costs), strict=True)
    ]
    blind = {}
    for device, cost in zip(devices, costs, strict=True):
        layers = tuple(
            own if own.impossible else mean for own, mean in zip(cost.layers, means, strict=True)
        )
        blind[device] = replace(cost, layers=layers, overhead_s=overhead_s)
    return replace(table, devices={**table.devices, **blind})
