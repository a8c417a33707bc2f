"""A pipeline in training explains its step, and does not change."""

from __future__ import annotations

from math import isclose

import pytest
from crews import Crews
from priced import Speeds, batch, losses, mixed, open_planned

import hetpipe as hp

PAIR = ("numpy:cpu:0",) * 2


def check_shares(explanation: hp.Explanation) -> None:
    for use in explanation.devices:
        assert 0 < use.computing <= 1
        whole = use.computing + use.receiving + use.summing + use.waiting + use.rest
        assert isclose(whole, 1.0, rel_tol=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "pipedream"])
def test_an_explanation_changes_nothing(crews: Crews, speeds: Speeds, schedule: str) -> None:
    count = 1 if schedule == "pipedream" else 3
    options = {"schedule": schedule, "microbatches": count, "cuts": [3]}
    with open_planned(crews(PAIR), mixed(far=False), **options) as pipe:
        wanted = losses(pipe, 0, 6)
    with open_planned(crews(PAIR), mixed(far=False), priced=True, **options) as pipe:
        before = pipe.explain()
        check_shares(before)
        assert before.measured is None
        assert before.predicted_s == pytest.approx(pipe.plan.step_s)
        assert "nothing was measured yet" in str(before)
        run = pipe.run(batch(index) for index in range(6))
        assert "step 0" in pipe._repr_html_()
        trained = [next(run).loss]
        pipe.explain()  # in a stream, with mini-batches under way
        assert f"last loss {trained[0]:.6g}" in pipe._repr_html_()
        trained += [result.loss for result in run]
        after = pipe.explain()
    assert trained == wanted
    check_shares(after)
    assert [use.device for use in after.devices] == ["m0", "m1"]
    assert after.measured is not None
    assert list(after.measured.losses) == list(enumerate(wanted))
    assert after.measured_s is not None
    assert all(each.measured_nbytes for each in after.memory.values())
    assert {(each.source, each.target) for each in after.transfers} == {("m0", "m1"), ("m1", "m0")}


def test_a_slower_device_gives_up_layers(crews: Crews, speeds: Speeds) -> None:
    """The advice follows the measured speed, and names the plan that the planner would make."""
    with open_planned(crews(PAIR), mixed(far=False), cuts=[3], priced=True) as pipe:
        speeds["m0"] = 5.0
        losses(pipe, 0, 4)
        move = next(each for each in pipe.explain().advice if each.change.startswith("moving"))
        assert move.change.endswith("to m1")
        assert move.plan is not None
        assert move.plan.cuts[0] < 3


def test_a_pipeline_that_only_predicts_is_explained(crews: Crews, priced: None) -> None:
    options = {"cuts": [3], "priced": True, "optimizer": None}
    with open_planned(crews(PAIR), mixed(far=False), captured=None, **options) as pipe:
        pipe.predict(batch(0)[0])
        text = str(pipe.explain())
    assert "no whole step was timed; " in text
    assert "bottleneck: " in text


def test_a_plan_without_costs_is_explained_by_times(crews: Crews) -> None:
    options = {"cuts": [3], "schedule": "gpipe"}
    with open_planned(crews(PAIR), mixed(far=False), **options) as pipe:
        losses(pipe, 0, 2)
        explanation = pipe.explain()
    check_shares(explanation)
    assert explanation.predicted_s is None
    assert "and was not predicted" in str(explanation)
    assert "no advice: the costs of this plan are unknown" in str(explanation)
