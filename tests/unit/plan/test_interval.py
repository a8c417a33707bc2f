"""The interval of a predicted step, computed from the spread of its costs."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace

import pytest
from tables import make_table

from hetpipe.cost.table import CostTable
from hetpipe.plan import Plan
from hetpipe.plan.baselines import even_plan, link_blind_plan
from hetpipe.plan.interval import SIMULATOR, WIDTH, stage_spread
from hetpipe.plan.planner import make_pipeline, make_plan
from hetpipe.plan.proposal import PlannerOptions


def spread_table(device: float, layer: float, layers: int = 8, **options: float) -> CostTable:
    table = make_table({"a": 1.0, "b": 0.5}, layers, **options)  # type: ignore[arg-type]
    devices = {
        id: replace(
            cost,
            spread=device,
            layers=tuple(replace(one, spread=layer) for one in cost.layers),
        )
        for id, cost in table.devices.items()
    }
    return replace(table, devices=devices)


def plan_of(table: CostTable) -> Plan:
    return make_plan(table, ["a", "b"], mini_batch=16, microbatches=4)


def test_a_spread_common_to_a_device_does_not_average_out_over_layers() -> None:
    for layers in (4, 16):
        plan, table = plan_of(spread_table(0.1, 0.1, layers)), spread_table(0.1, 0.1, layers)
        assert stage_spread(plan.stages[0], table) == pytest.approx((0.1**2 + SIMULATOR**2) ** 0.5)


def test_a_spread_of_single_layers_averages_out() -> None:
    table = spread_table(1e-9, 0.1, 16)
    stage = plan_of(table).stages[0]
    count = stage.hi - stage.lo
    assert stage_spread(stage, table) == pytest.approx((0.1**2 / count + SIMULATOR**2) ** 0.5)


def test_the_interval_reaches_from_a_faster_to_a_slower_step() -> None:
    table = spread_table(0.1, 0.1)
    plan = plan_of(table)
    assert plan.interval_s is not None
    factor = 1 + WIDTH * (0.1**2 + SIMULATOR**2) ** 0.5
    assert plan.interval_s == pytest.approx((plan.step_s / factor, plan.step_s * factor))
    low_s, high_s = plan.interval_s
    assert f"({1e3 * low_s:.2f} .. {1e3 * high_s:.2f})" in str(plan)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream", "zb-h1"])
def test_an_interval_contains_its_step(schedule: str) -> None:
    table = spread_table(0.05, 0.1, latency_s=0.1)
    weights = "stash" if schedule == "pipedream" else "flush"
    plan = make_plan(
        table, ["a", "b"], mini_batch=16, microbatches=4, schedule=schedule, weights=weights
    )
    assert plan.interval_s is not None
    assert plan.interval_s[0] < plan.step_s < plan.interval_s[1]


def test_costs_without_a_spread_give_no_interval() -> None:
    plan = plan_of(make_table({"a": 1.0, "b": 0.5}))
    assert plan.interval_s is None
    assert " .. " not in str(plan).splitlines()[-1]


def test_plans_of_baselines_have_an_interval() -> None:
    table = spread_table(0.1, 0.1)
    for plan in (
        even_plan(table, ["a", "b"], mini_batch=16, microbatches=4),
        link_blind_plan({4: table}, ["a", "b"], mini_batch=16),
    ):
        assert plan.interval_s is not None


def test_only_the_chosen_plan_gets_an_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: dict[str, int] = defaultdict(int)

    def counted(plan: Plan, table: CostTable) -> Plan:
        calls["intervals"] += 1
        return plan

    monkeypatch.setattr("hetpipe.plan.planner.with_interval", counted)
    make_pipeline({4: spread_table(0.1, 0.1)}, ["a", "b"], PlannerOptions(16))
    assert calls["intervals"] == 1
