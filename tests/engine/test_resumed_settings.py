"""Training resumes with its checkpoint's settings unless the user names the changed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crews import Crews
from torch import nn
from typer.testing import CliRunner

import hetpipe as hp
from hetpipe.checkpoint.checkpoint import Checkpoint
from hetpipe.checkpoint.series import load as load_checkpoint
from hetpipe.cli.app import app
from hetpipe.crew.crew import Crew
from hetpipe.errors import CheckpointError, HetpipeError
from hetpipe.pipeline.resume import progress_of

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(7))
Y = torch.tensor([0, 1, 0, 1, 2, 1, 2, 2])
BEFORE: dict[str, Any] = {"optimizer": hp.optim.adamw(lr=0.1), "clip_norm": 0.5}


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def options(crew: Crew, **more: Any) -> dict[str, Any]:
    given = {"cuts": [1], "microbatches": 2, "schedule": "1f1b", **BEFORE, **more}
    return {"cluster": crew.cluster, "crew": crew, **given}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint, which the first test writes."""
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture
def saved(crew: Crew, folder: Path) -> Path:
    if not any(folder.iterdir()):
        with hp.Pipeline(model(), F.cross_entropy, (X, Y), **options(crew)) as pipe:
            pipe.step(X, Y)
            pipe.save(folder)
    return folder


def load(crew: Crew, saved: Path, **more: Any) -> hp.Pipeline:
    return hp.Pipeline.load(saved, model(), F.cross_entropy, (X, Y), **options(crew, **more))


@pytest.mark.parametrize(
    ("changes", "before", "now"),
    [
        ({"seed": 1}, "seed=0", "seed=1"),
        ({"clip_norm": None}, "clip_norm=0.5", "clip_norm=None"),
        ({"clip_each": True}, "clip_each=False", "clip_each=True"),
        ({"accumulate": 2}, "accumulate=1", "accumulate=2"),
        ({"cut_dtype": "float16"}, "cut_dtype=None", "cut_dtype='float16'"),
        ({"loss_scale": 8.0}, "loss_scale=None", "loss_scale=8.0"),
        ({"microbatches": 4}, "microbatches=2", "microbatches=4"),  # batch norm depends on it
        (
            {"optimizer": hp.optim.adamw(lr=0.1, weight_decay=0.1)},
            "optimizer.weight_decay=0.01",
            "optimizer.weight_decay=0.1",
        ),
        (
            {"optimizer": hp.optim.adamw(lr=0.1, decay_exclude=lambda name: name == "3.bias")},
            "optimizer.groups=[]",
            "optimizer.groups=[['3.bias']]",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_setting_is_refused_by_name(
    crew: Crew, saved: Path, changes: dict[str, Any], before: str, now: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(crew, saved, **changes)
    assert f"trained with {before}, and would continue with {now}" in str(caught.value)


def test_another_precision_is_refused_by_name(crews: Crews, saved: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(crews(("pytorch:cpu:0",) * 4), saved, precision="bfloat16")
    said = str(caught.value)
    assert "trained with precision=None, and would continue with precision='bfloat16'" in said
    assert said.endswith("by changed=['precision'] (of `hetpipe train`: --changed precision)")


@pytest.mark.slow
def test_a_command_may_change_a_setting(tmp_path: Path) -> None:
    cluster, saved = tmp_path / "two.toml", str(tmp_path / "saved")
    device = '[[device]]\nid = "{}"\ndevice = "numpy:cpu:0"\n'
    cluster.write_text('transport = "local"\n' + device.format("a") + device.format("b"))
    command = ["train", "mlp", "--steps", "1", "--no-check", "--mini-batch", "8", "--cuts", "2"]
    command += ["--microbatches", "1", "--schedule", "1f1b", "--cluster", str(cluster)]

    def run(*more: str) -> Any:
        return CliRunner().invoke(app, [*command, *more])

    assert run("--save", saved).exit_code == 0
    refused = run("--resume", saved, "--seed", "1")
    assert "with seed=0, and would continue with seed=1" in str(refused.exception)
    done = run("--resume", saved, "--seed", "1", "--changed", "seed", "--save", saved)
    assert done.exit_code == 0, done.output
    assert progress_of(load_checkpoint(Path(saved))).steps == 2


def test_a_setting_may_change_if_the_user_names_it(crew: Crew, saved: Path) -> None:
    other = hp.optim.adamw(lr=0.5)  # the learning rate may always change
    with load(crew, saved, seed=1, changed=["seed"], optimizer=other) as pipe:
        assert pipe.steps == 1
        pipe.step(X, Y)
    with pytest.raises(CheckpointError, match=r"with clip_norm=0\.5, and"):
        load(crew, saved, seed=1, clip_norm=1.0, changed=["seed"])
    with pytest.raises(CheckpointError, match="keeps no setting 'sead'"):
        load(crew, saved, changed=["sead"])
    with pytest.raises(HetpipeError, match=r"give a list, as \['seed'\]"):
        load(crew, saved, changed="seed")


def test_a_new_rule_begins_with_its_loss_scale(crew: Crew, saved: Path, tmp_path: Path) -> None:
    rule = hp.LossScale(start=64.0, interval=1)
    with load(crew, saved, loss_scale=rule, changed=["loss_scale"]) as pipe:
        assert pipe.loss_scale == 64
        pipe.step(X, Y)
        pipe.save(tmp_path)
    with load(crew, tmp_path, loss_scale=rule) as pipe:
        assert pipe.loss_scale == 128


def test_an_early_checkpoint_has_no_settings(crew: Crew, saved: Path) -> None:
    checkpoint = load_checkpoint(saved)
    manifest = json.loads(json.dumps(checkpoint.manifest))
    assert manifest.pop("settings")["seed"] == 0
    early = Checkpoint(manifest, checkpoint.tensors)
    # It has no average for certain, and each of its micro-batches had a loss.
    assert progress_of(early).settings == {"ema": None, "loss_over": "micro-batch"}
    with hp.Pipeline(
        model(), F.cross_entropy, (X, Y), resume=early, **options(crew, seed=3)
    ) as pipe:  # fmt: skip
        assert pipe.steps == 1
