"""Trials of training methods: equal starts, targets, the table and the command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hetpipe import optim
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.papers import learning
from hetpipe.papers.learning import (
    GPIPE,
    IN_MICROBATCHES,
    PIPEDREAM,
    PIPEOPTIM,
    UNPARTITIONED,
    spread,
)
from hetpipe.papers.trial import WINDOW, Subject, Task, Trial, seeded_workload, unprofiled

pytest.importorskip("sklearn")

TASK = Task(
    "digits", optim.sgd(lr=0.05, momentum=0.9), 16, 6, 2.0, "accuracy", (UNPARTITIONED, PIPEDREAM)
)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    members = tuple(Member(f"stage {n}", "pytorch:cpu:0") for n in range(3))
    with Crew.start(Cluster(members, transport="local")) as started:
        yield started


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject("digits", TASK.mini_batch, seed=1)


def trial(*losses: float) -> Trial:
    return Trial(losses, tuple(float(n) for n in range(len(losses))), 0.5)


def test_a_target_is_reached_by_the_mean_of_a_window() -> None:
    falling = trial(*[3.0] * WINDOW, *[1.0] * WINDOW)
    assert falling.reached(3.0) == WINDOW
    assert falling.reached(2.0) == WINDOW + WINDOW // 2
    assert falling.reached(1.0) == 2 * WINDOW
    assert falling.reached(0.9) is None
    assert trial(*[0.0] * (WINDOW - 1)).reached(1.0) is None  # too short for a mean


def test_one_good_mini_batch_reaches_no_target() -> None:
    assert trial(*[3.0] * WINDOW, 0.0, *[3.0] * WINDOW).reached(2.0) is None
    assert trial(*[math.nan] * 2 * WINDOW).reached(2.0) is None


def test_weights_and_data_follow_the_seed() -> None:
    one, again, other = (seeded_workload("digits", seed) for seed in (1, 1, 2))
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name])
    weights = [workload.model.state_dict()["0.weight"] for workload in (one, other)]
    assert not torch.equal(*weights)


@pytest.mark.slow
def test_stages_have_equal_layer_counts_or_the_cuts_of_the_task() -> None:
    workload = seeded_workload("digits", 0)
    captured = Captured(workload.model, workload.loss_fn, next(workload.batches(16, 0)))
    plan, _ = unprofiled(captured, ["a", "b", "c"], TASK, PIPEDREAM)
    counts = [stage.hi - stage.lo for stage in plan.stages]
    assert max(counts) - min(counts) <= 1
    assert (plan.in_flight, plan.weights) == ((3, 2, 1), "stash")
    plan, _ = unprofiled(captured, ["a", "b", "c"], replace(TASK, cuts=(5, 11)), GPIPE)
    assert (plan.cuts, plan.in_flight) == ((5, 11), (4, 4, 4))


@pytest.mark.slow
def test_gpipe_equals_unpartitioned_training_in_micro_batches(crew: Crew, subject: Subject) -> None:
    wanted = subject.trial(TASK, IN_MICROBATCHES, crew)
    found = subject.trial(TASK, GPIPE, crew)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-3)
    assert found.figure == pytest.approx(wanted.figure, abs=2 / 360)
    assert len(found.times_s) == TASK.steps
    assert sorted(found.times_s) == list(found.times_s)


@pytest.mark.slow
def test_every_trial_begins_with_the_weights_of_the_seed(crew: Crew, subject: Subject) -> None:
    """Earlier trials change nothing; a stale pipeline then trains differently."""
    plain = subject.trial(TASK, UNPARTITIONED, crew)
    stale = subject.trial(TASK, PIPEDREAM, crew)
    assert subject.trial(TASK, UNPARTITIONED, crew).losses == plain.losses
    assert subject.trial(TASK, PIPEDREAM, crew).losses == stale.losses
    assert stale.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)
    assert stale.losses[-1] != pytest.approx(plain.losses[-1], rel=1e-2)
    predicted = subject.trial(TASK, PIPEOPTIM, crew)
    assert predicted.losses[-1] != pytest.approx(stale.losses[-1], rel=1e-3)


def test_a_spread_tells_how_many_trials_reached_the_target() -> None:
    assert spread([1.0, 2.0, 6.0], 1, of=3) == "3.0 (1.0 .. 6.0)"
    assert spread([1.0, 2.0], 0, of=3) == "2 of 3: 1 .. 2"
    assert spread([], 1, of=3) == "never"


@pytest.mark.slow
def test_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learning, "TASKS", (TASK,))
    learning.main(["--steps", "2", "--seeds", "1", "--json", str(tmp_path / "found.json")])
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if "PipeDream" in line)
    written = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [entry["method"]["name"] for entry in written] == ["unpartitioned", "PipeDream"]
    assert len(written[1]["trials"][0]["losses"]) == 2
    assert f"{100 * written[1]['trials'][0]['figure']:.1f}" in row
    assert "never" in row  # two mini-batches are shorter than a window


def test_absent_devices_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learning, "DEVICES", ("pytorch:cpu:0", "abacus:0"))
    with pytest.raises(SystemExit, match="1"):
        learning.main(["--devices"])
    assert "no device 'abacus:0'" in capsys.readouterr().err
