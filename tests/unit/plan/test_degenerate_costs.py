"""Planners with layers that run on no device or on few, and with times that are all zero."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tables import make_table

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.cost.table import LayerCost, LinkCost
from hetpipe.division import divide_samples
from hetpipe.errors import HetpipeError, PlanError
from hetpipe.plan.dapple import candidates
from hetpipe.plan.planners.choice import PLANNERS, plan
from hetpipe.plan.planners.pipedream import Level, plan_pipedream
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.plan.server_groups import Machines, Wire
from hetpipe.study.comparison import together

FREE = LayerCost(0.0, 0.0, 0.0)
REFUSED = LayerCost(math.inf, math.inf, 0.0, "no kernel for it")


def case(devices, layers_of):
    """Return tables of 4 layers on these devices; `layers_of` changes a device's costs."""
    names = "abcdefghijkl"[:devices]
    tables = {size: make_table(dict.fromkeys(names, 1.0), 4, samples=size) for size in (1, 8)}
    for size, table in tables.items():
        changed = {
            name: replace(cost, layers=layers_of(name, cost.layers))
            for name, cost in table.devices.items()
        }
        links = dict.fromkeys(table.links, LinkCost(0.0, math.inf))
        tables[size] = replace(table, devices=changed, links=links)
    return tables, Cluster(tuple(Member(name, "made:up:0") for name in names))


def without(*refused):
    """Return a change for `case` that removes the layers with these names or numbers."""
    return lambda name, layers: tuple(
        REFUSED if f"{name}{number}" in refused or str(number) in refused else layer
        for number, layer in enumerate(layers)
    )


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("schedules", [(), ("pipedream",)])
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
class TestPlanners:
    def test_a_layer_that_runs_nowhere_is_named(self, planner, schedules, devices):
        for refused in (("2",), tuple("0123")):
            tables, cluster = case(devices, without(*refused))
            with pytest.raises(PlanError, match=rf"can run layer l{refused[0]} \(a: no kernel"):
                plan(tables, cluster, PlannerOptions(8, schedules=schedules), planner)

    def test_layers_for_some_devices_give_a_plan_or_are_named(self, planner, schedules, devices):
        for refused in (("a0", "a1", "a2", "a3"), ("a0",), ("a0", "a3", "b1")):
            tables, cluster = case(devices, without(*refused))
            refusal = ""
            try:
                step_s = plan(
                    tables, cluster, PlannerOptions(8, schedules=schedules), planner
                ).step_s
            except HetpipeError as error:
                refusal, step_s = str(error), 1.0
            assert 0 < step_s < math.inf
            assert not refusal or "run layer l" in refusal or "that flush" in refusal

    def test_zero_times_give_a_plan(self, planner, schedules, devices):
        options = PlannerOptions(8, schedules=schedules)
        tables, cluster = case(devices, lambda name, layers: (FREE,) * 4)
        if planner == "dapple" and schedules:
            with pytest.raises(PlanError, match="dapple is for schedules that flush, not for pipe"):
                plan(tables, cluster, options, planner)
            return
        assert plan(tables, cluster, options, planner).step_s == 0.0
        tables, cluster = case(devices, lambda name, layers: (FREE,) * 4 if name == "a" else layers)
        assert plan(tables, cluster, options, planner).step_s >= 0.0


def test_the_papers_planners_name_the_layer():
    costs = ((0.0, math.inf), (0.0, math.inf), (1, 1), (1, 1), (1, 0))
    chain, wire = ChainCosts(("first", "last"), *costs), Wire(1.0, 1.0)
    with pytest.raises(PlanError, match="layer last takes inf s forward"):
        plan_pipedream(chain, [Level(2, 1.0)])
    with pytest.raises(PlanError, match="layer last takes inf s forward"):
        candidates(chain, Machines((2,), wire, wire), samples=1, global_batch=2)


def test_devices_without_any_time_are_infinitely_fast():
    assert together(*case(2, lambda name, layers: (FREE,) * 4)) == math.inf


def test_many_devices_are_not_all_listed():
    tables, cluster = case(12, without("2"))
    with pytest.raises(PlanError, match=r"h: no kernel for it; 4 more\); add a device"):
        plan(tables, cluster, PlannerOptions(8))


@pytest.mark.parametrize("speeds", [[1e12, 1, 1, 1, 1], [1, 1e9, 0.1], [100.0] + [1.0] * 7])
def test_slow_replicas_get_a_row_if_there_are_enough(speeds):
    rows = divide_samples(8, speeds)
    assert sum(rows) == 8
    assert min(rows) >= 1
    assert rows.index(max(rows)) == speeds.index(max(speeds))
