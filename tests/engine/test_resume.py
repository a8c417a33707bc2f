"""Interrupted training resumes under the same plan and under other plans."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from delayed import ADAM, SGD, batch, loss_fn, task
from pipelines import pipeline

import hetpipe as hp
from hetpipe import checkpoint
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import CheckpointError, HetpipeError, PlanError

STEPS = 12


def open_straight(crew: Crew, stages: int, weights: str, **options: Any) -> hp.Pipeline:
    """Put one stage on each of the first members; the default optimizer is Adam."""
    schedule = "1f1b" if weights == "flush" else "pipedream"
    options = {"optimizer": ADAM[0], "weights": weights, **options}
    return pipeline(crew, *task(), "0123"[:stages], schedule, **options)


def open_resumed(
    crew: Crew, folder: Path, stages: int, weights: str, **options: Any
) -> hp.Pipeline:
    """Open such a pipeline from a checkpoint, with a model of other initial values."""
    schedule = "1f1b" if weights == "flush" else "pipedream"
    options = {"optimizer": ADAM[0], "weights": weights, "checkpoint": folder, **options}
    return pipeline(crew, *task(1), "0123"[:stages], schedule, **options)


def run(pipe: hp.Pipeline, lo: int, hi: int) -> None:
    assert [r.index for r in pipe.run(batch(b) for b in range(lo, hi))] == list(range(lo, hi))


@pytest.mark.parametrize("weights", ["flush", "stash", "vertical-sync", "pipeoptim"])
def test_the_same_plan_continues_bit_for_bit(crew: Crew, tmp_path: Path, weights: str) -> None:
    """The result equals a run that only flushed at that step."""
    stop = random.Random(weights).randrange(1, STEPS)
    with open_straight(crew, 3, weights) as pipe:
        run(pipe, 0, stop)
        pipe.save(tmp_path)
        run(pipe, stop, STEPS)
        wanted = pipe.state_dict()
    with open_resumed(crew, tmp_path, 3, weights) as pipe:
        run(pipe, stop, STEPS)
        state = pipe.state_dict()
    for name, value in wanted.items():
        assert torch.equal(state[name], value), (stop, name)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_another_number_of_stages_continues_from_the_checkpoint(
    crew: Crew, tmp_path: Path, stages: int
) -> None:
    with open_straight(crew, 3, "flush") as pipe:
        run(pipe, 0, 5)
        pipe.save(tmp_path)
        run(pipe, 5, STEPS)
        wanted = pipe.state_dict()
    with open_resumed(crew, tmp_path, stages, "flush") as pipe:
        run(pipe, 5, STEPS)
        state = pipe.state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-9)


def test_the_default_plan_is_the_checkpoints(crew: Crew, tmp_path: Path) -> None:
    with open_straight(crew, 3, "stash") as pipe:
        pipe.save(tmp_path)
        plan = pipe.plan
    with open_resumed(crew, tmp_path, 2, "flush", plan=None) as pipe:
        assert pipe.plan == plan


def test_another_optimizer_and_damaged_files_are_refused(crew: Crew, tmp_path: Path) -> None:
    with open_straight(crew, 2, "flush") as pipe:
        pipe.save(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"optimizer is adam \(state: mean, square\), but sgd"
    ):
        open_resumed(crew, tmp_path, 2, "flush", optimizer=SGD[0])
    damaged = next(tmp_path.glob("param-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=damaged.name):
        open_resumed(crew, tmp_path, 2, "flush")


def test_a_plan_for_absent_devices_names_the_cure(crew: Crew, tmp_path: Path) -> None:
    with open_straight(crew, 2, "flush") as pipe:
        pipe.save(tmp_path)
    other = Cluster((Member("other", "numpy:cpu:0"),), transport="local")
    options: dict[str, Any] = {"cluster": other, "optimizer": ADAM[0]}
    with pytest.raises(PlanError, match="not run here; give another plan, or a part of one"):
        hp.Pipeline.load(tmp_path, *task(), **options)
    options |= {"cuts": [], "microbatches": 2, "schedule": "1f1b"}
    with hp.Pipeline.load(tmp_path, *task(), **options) as pipe:
        assert pipe.plan.devices == ("other",)


def test_another_model_is_refused(crew: Crew, tmp_path: Path) -> None:
    with open_straight(crew, 2, "flush") as pipe:
        pipe.save(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)).double()
    with pytest.raises(CheckpointError, match="of another model"):
        hp.Pipeline.load(
            tmp_path, model, loss_fn, batch(0), cluster=crew.cluster, crew=crew,
            optimizer=ADAM[0], microbatches=1, schedule="1f1b", cuts=[1],
        )  # fmt: skip


@pytest.mark.parametrize("weights", ["flush", "stash"])
def test_a_restore_that_breaks_off_in_mid_file_can_be_repeated(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    def cut_after_load(folder: Path) -> checkpoint.Checkpoint:
        saved = checkpoint.load(folder)
        (states,) = folder.glob("state-*")
        os.truncate(states, states.stat().st_size - 8)
        return saved

    with open_straight(crew, 3, weights) as pipe:
        run(pipe, 0, 2)
        pipe.save(tmp_path / "intact")
        pipe.save(tmp_path / "cut")
        wanted = pipe.state_dict()
        run(pipe, 2, 4)
        with monkeypatch.context() as patch:
            patch.setattr("hetpipe.pipeline.saving.load_checkpoint", cut_after_load)
            with pytest.raises(CheckpointError, match=r"cannot read .*/cut/state-.*shorter"):
                pipe.restore(tmp_path / "cut")
        calls: list[Callable[[], Any]] = [
            lambda: pipe.step(*batch(4)), lambda: next(pipe.run([batch(4)])), pipe.state_dict,
            lambda: pipe.evaluate([batch(4)]), lambda: pipe.save(tmp_path / "cut"),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(HetpipeError, match=r"restore of .*/cut .* failed.*state-.*shorter"):
                call()
        pipe.restore(tmp_path / "intact")
        assert pipe.steps == 2
        assert all(torch.equal(wanted[name], v) for name, v in pipe.state_dict().items())
        run(pipe, 2, 4)
        wanted = pipe.state_dict()
    with open_resumed(crew, tmp_path / "intact", 3, weights) as pipe:
        run(pipe, 2, 4)
        assert all(torch.equal(wanted[name], v) for name, v in pipe.state_dict().items())
