"""A pipeline in training corrects its predicted step for the current speed of its devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import MLP

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.plan.planner import make_plan
from hetpipe.profile.measure import profile

CLUSTER = Cluster((Member("a", "numpy:cpu:0"), Member("b", "numpy:cpu:0")), transport="local")


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "weights"), [("1f1b", "flush"), ("pipedream", "stash")])
def test_a_prediction_is_corrected_between_steps(
    schedule: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The correction leaves the weights unchanged, and training continues."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    torch.manual_seed(0)
    model, optimizer = MLP(), hp.optim.sgd(0.1)
    example = (torch.randn(8, 20), torch.randint(0, 5, (8,)))
    captured = Captured(model, F.cross_entropy, example)
    with Crew.start(CLUSTER) as crew:
        table = profile(captured, crew, optimizer, [8])[8]
        plan = make_plan(
            table, ["a", "b"], mini_batch=8, microbatches=1, schedule=schedule, weights=weights,
            cuts=[1],
        )  # fmt: skip
        pipe = hp.Pipeline(
            model, F.cross_entropy, example, cluster=CLUSTER, crew=crew, optimizer=optimizer,
            captured=captured, plan=plan, costs=table,
        )  # fmt: skip
        assert not pipe.corrected().by_passes  # no passes have run yet
        list(pipe.run([example] * 6))  # in a stream, some mini-batches end later
        before = pipe.state_dict()
        correction = pipe.corrected()
        after = pipe.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert sorted(correction.drifts) == ["a", "b"]
        assert correction.by_passes
        assert correction.raw_s == pipe.plan.step_s
        assert correction.interval_s is not None
        low_s, high_s = correction.interval_s
        assert 0 < low_s < correction.corrected_s < high_s
        list(pipe.run([example] * 3))
        assert pipe.steps == 9
