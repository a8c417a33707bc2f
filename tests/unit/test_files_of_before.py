"""Files that an earlier hetpipe wrote are still read correctly: tests/data."""

import json
from pathlib import Path

import numpy as np
import pytest

from hetpipe import checkpoint
from hetpipe.cost import CostTable, read_costs
from hetpipe.errors import CostError, PlanError
from hetpipe.plan import Plan, read_plan, write_plan
from hetpipe.plan.pricing import predict
from hetpipe.simulate.timeline import Timeline

DATA = Path(__file__).parents[1] / "data"


def document(name):
    return json.loads((DATA / name).read_text())


def test_a_plan_of_version_2_without_costs():
    plan, costs = read_plan(DATA / "plan.json")
    assert (plan.cuts, plan.schedule, plan.mini_batch) == ((1,), "1f1b", 8)
    now = {
        "version": 5,
        "interval_s": None,
        "recompute": False,
        "lower_bound_s": None,
        "splits": [],
    }
    assert json.loads(json.dumps(plan.to_json())) == document("plan.json") | now
    assert costs is None


def test_a_cost_table_of_version_1():
    """It has no probe and no spread, and its times are unchanged."""
    costs = read_costs(DATA / "costs.json")
    assert list(costs.devices) == ["numpy:cpu:0#0", "numpy:cpu:0#1"]
    data = json.loads(json.dumps(costs.to_json()))
    assert CostTable.from_json(data) == costs
    for device in data["devices"].values():
        assert [device.pop(key) for key in ("spread", "alone", "probe", "probe_alone")] == [
            0.0, 1.0, None, None,
        ]  # fmt: skip
        assert [layer.pop("spread") for layer in device["layers"]] == [0.0] * len(costs.layers)
    for link in data["links"]:
        assert [link.pop(key) for key in ("sum_speed", "copying", "media")] == [1.0, 0.5, []]
    assert data | {"version": 1} == document("costs.json")


def test_a_cost_table_of_version_2():
    """Sums run at the speed of messages."""
    now = json.loads(json.dumps(read_costs(DATA / "costs.json").to_json()))
    before = [
        {key: value for key, value in link.items() if key != "sum_speed"} for link in now["links"]
    ]
    assert CostTable.from_json(now | {"version": 2, "links": before}).to_json() == now


def test_links_without_the_share_of_copies():
    """The cores of both ends copy half of a message, and no link shares its medium."""
    now = json.loads(json.dumps(read_costs(DATA / "costs.json").to_json()))
    before = [
        {key: value for key, value in link.items() if key not in ("copying", "media")}
        for link in now["links"]
    ]
    assert CostTable.from_json(now | {"links": before}).to_json() == now


def test_a_timeline():
    timeline = Timeline.from_json(document("timeline.json"))
    assert len(timeline.workers) == 2
    assert timeline.to_json() == document("timeline.json")


def test_a_checkpoint_with_its_plan():
    found = checkpoint.load(DATA / "checkpoint")
    assert found.manifest["step"] == 3
    assert Plan.from_json(found.manifest["plan"]).devices == ("numpy:cpu:0#0", "numpy:cpu:0#1")
    assert {role: len(named) for role, named in found.tensors.items()} == {
        "param": 4, "buffer": 0, "state": 8,
    }  # fmt: skip
    assert all(np.isfinite(array).all() for array in found.tensors["param"].values())


def test_a_plan_keeps_its_costs(tmp_path):
    plan, costs = read_plan(DATA / "plan.json")[0], read_costs(DATA / "costs.json")
    write_plan(tmp_path / "p.json", plan, costs)
    assert read_plan(tmp_path / "p.json") == (plan, costs)
    assert predict(*read_plan(tmp_path / "p.json")).total_s == pytest.approx(plan.step_s)
    write_plan(tmp_path / "p.json", plan, None)
    assert read_plan(tmp_path / "p.json") == (plan, None)
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda costs: costs["layers"][1].update(name="other"), PlanError, "costs.layers has 2"),
        (lambda costs: costs["layers"][1].pop("name"), CostError, "costs: layers.1 lacks the key"),
        (lambda costs: costs.update(version=9), CostError, "has version 9, this hetpipe reads 3"),
    ],
)
def test_costs_that_do_not_fit_the_plan_are_refused(tmp_path, change, error, match):
    costs = document("costs.json")
    change(costs)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document("plan.json") | {"costs": costs}))
    with pytest.raises(error, match=match) as caught:
        read_plan(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_costs_without_a_device_of_the_plan_are_refused(tmp_path):
    costs = read_costs(DATA / "costs.json")
    fewer = CostTable(
        costs.model, costs.samples, costs.layers, {"numpy:cpu:0#0": costs.devices["numpy:cpu:0#0"]}
    )
    write_plan(tmp_path / "p.json", read_plan(DATA / "plan.json")[0], fewer)
    with pytest.raises(PlanError, match="lacks 'numpy:cpu:0#1', which the plan names"):
        read_plan(tmp_path / "p.json")
