"""Plans as JSON, checked while they are read, and as text."""

import json

import pytest

from hetpipe.errors import PlanError
from hetpipe.plan.plan import Plan, StagePlan

MIB = 2**20

PLAN = Plan(
    model="toy",
    layers=("embed", "block", "head"),
    stages=(
        StagePlan(0, 2, ("gpu:0",), 2, 0.010, 0.0205, 0.001, 3 * MIB, 1024 * MIB),
        StagePlan(2, 3, ("cpu:0",), 1, 0.009, 0.021, 0.001, 5 * MIB // 2, 2048 * MIB),
    ),
    schedule="1f1b",
    mini_batch=32,
    microbatches=8,
    step_s=0.32,
    cut_nbytes=(4096,),
    label="measured",
    origin="balanced",
    notes=("cpu:0 cannot run layer embed: no kernel",),
)


def document():
    return json.loads(json.dumps(PLAN.to_json(), allow_nan=False))


def test_round_trip():
    assert Plan.from_json(document()) == PLAN


def test_properties():
    assert PLAN.cuts == (2,)
    assert PLAN.devices == ("gpu:0", "cpu:0")
    assert PLAN.in_flight == (2, 1)
    assert PLAN.samples_per_s == 100.0
    assert PLAN.fill_limit == 8 / 9


def test_text():
    assert str(PLAN).splitlines() == [
        "stage  layers              device  forward ms  backward ms  in flight  memory MiB",
        "0      0-1 embed .. block  gpu:0   10.00       20.50        2          3.0 / 1024",
        "1      2-2 head            cpu:0   9.00        21.00        1          2.5 / 2048",
        "1f1b, 8 micro-batches of a mini-batch of 32: step 320.00 ms, 100.0 samples/s, "
        "fill limit 89 %, measured costs, balanced plan",
        "note: cpu:0 cannot run layer embed: no kernel",
    ]


@pytest.mark.parametrize("key", [key for key in document() if key != "version"])
def test_a_missing_key_is_named(key):
    data = document()
    del data[key]
    with pytest.raises(PlanError, match=f"plan lacks the key '{key}'"):
        Plan.from_json(data)


@pytest.mark.parametrize("key", document()["stages"][1])
def test_a_missing_key_of_a_stage_is_named(key):
    data = document()
    del data["stages"][1][key]
    with pytest.raises(PlanError, match=rf"the plan: stages\.1 lacks the key '{key}'"):
        Plan.from_json(data)


def test_an_unknown_key_is_named_and_known_keys_are_listed():
    with pytest.raises(PlanError, match="unknown key 'colour'; known: model, layers, stages"):
        Plan.from_json({**document(), "colour": 1})
    data = document()
    data["stages"][0]["colour"] = 1
    with pytest.raises(PlanError, match=r"stages\.0 has an unknown key 'colour'; known: lo, hi"):
        Plan.from_json(data)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("microbatches", "8"), ("microbatches", 8.0), ("microbatches", True), ("step_s", None),
        ("schedule", 3), ("stages", 5), ("layers", "abc"), ("cut_nbytes", 4096),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named(key, value):
    with pytest.raises(PlanError, match=f"the plan: {key} is .*, it should be "):
        Plan.from_json({**document(), key: value})


def test_a_stage_that_is_no_object_is_refused():
    with pytest.raises(PlanError, match=r"the plan: stages\.0 is 7, it should be an object"):
        Plan.from_json({**document(), "stages": [7]})


@pytest.mark.parametrize("version", [None, 0, 1, "2"])
def test_another_version_is_refused(version):
    with pytest.raises(PlanError, match="this hetpipe reads 5"):
        Plan.from_json({**document(), "version": version})


@pytest.mark.parametrize(("lo", "hi"), [(1, 3), (2, 4), (2, 2)])
def test_stages_must_cover_the_layers(lo, hi):
    data = document()
    data["stages"][1].update(lo=lo, hi=hi)
    with pytest.raises(PlanError, match=r"do not cover layers 0\.\.3"):
        Plan.from_json(data)


def test_there_is_one_cut_between_two_stages():
    with pytest.raises(PlanError, match="2 stages have 1 cuts, but cut_nbytes has 0 entries"):
        Plan.from_json({**document(), "cut_nbytes": []})
