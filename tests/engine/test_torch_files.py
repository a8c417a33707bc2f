"""Programs without hetpipe read checkpoints and exports, and continue a training with torch."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import shared
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint import load as load_dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from typer.testing import CliRunner

import hetpipe as hp
from hetpipe import checkpoint
from hetpipe.cli.app import app
from hetpipe.crew.crew import Crew
from hetpipe.errors import CheckpointError, HetpipeError

DEVICES = ("numpy:cpu:0", "pytorch:cpu:0")
X = torch.randint(10, (8,), generator=torch.Generator().manual_seed(1))
Y = torch.randint(10, (8,), generator=torch.Generator().manual_seed(2))


class Tied(nn.Module):
    """Has a tied parameter, a frozen one, buffers, and a parameter that no operator uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.near = nn.Embedding(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.frozen = nn.Linear(6, 6)
        self.far = nn.Linear(6, 10, bias=False)
        self.far.weight = self.near.weight
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.far(self.frozen(self.norm(self.near(x))))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output * self.factor, y)


def train(crew: Crew, folder: Path, model: nn.Module, rule: Any, **options: Any) -> Any:
    """Save after two steps into `folder`; return the state then, and the loss of the next step."""
    loss_fn = options.pop("loss_fn", nn.functional.cross_entropy)
    with hp.Pipeline(
        model, loss_fn, (X, Y), cluster=crew.cluster, crew=crew, optimizer=rule, cuts=[2],
        microbatches=1, schedule="1f1b", captured=shared(model, loss_fn, (X, Y)), **options,
    ) as pipe:  # fmt: skip
        for _ in range(2):
            pipe.step(X, Y)
        pipe.save(folder)
        state = pipe.state_dict()
        return state, [pipe.step(X, Y) for _ in range(2)]


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_a_file_has_the_models_state(crew: Crew, tmp_path: Path, form: str) -> None:
    wanted, _ = train(crew, tmp_path / "run", Tied(0), hp.optim.adamw(), loss_fn=Scaled())
    target = tmp_path / f"model.{form}"
    target.write_text("an older file")
    told = run("export", tmp_path / "run", target)
    assert f"{target}: the model's state_dict of step 2" in told
    left_out = "unused (used by no operator), loss.factor (trained by the loss)"
    assert f"left out: {left_out}, the optimizer's state" in told
    state = torch.load(target) if form == "pt" else load_file(target)
    assert sorted(state) == sorted(name for name in wanted if name != "unused")
    assert all(torch.equal(state[name], wanted[name]) for name in state)
    assert state["near.weight"].dtype == torch.float32
    missing = Tied(1).load_state_dict(state, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["unused"], [])


P = {"lr": 0.05}
PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sgd": (hp.optim.sgd, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}),
    "adam": (hp.optim.adam, torch.optim.Adam, {"amsgrad": True}),
    "adamw": (hp.optim.adamw, torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamax": (hp.optim.adamax, torch.optim.Adamax, {}),
    "rmsprop": (hp.optim.rmsprop, torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "adagrad": (hp.optim.adagrad, torch.optim.Adagrad, {}),
    "adadelta": (hp.optim.adadelta, torch.optim.Adadelta, {}),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", PAIRS)
def test_torch_continues_from_its_distributed_format(crew: Crew, tmp_path: Path, name: str) -> None:
    ours, theirs, settings = PAIRS[name]
    _, losses = train(crew, tmp_path / "run", Tied(0), ours(**P, **settings))
    told = run("export", tmp_path / "run", tmp_path / "dcp", "--format", "dcp")
    assert "model and optim.state of step 2" in told
    assert "the state" not in told
    model = Tied(1)
    optimizer = theirs([p for p in model.parameters() if p.requires_grad], **P, **settings)
    states = get_optimizer_state_dict(model, optimizer)
    entries = {k: v for k, v in model.state_dict().items() if k != "unused"}
    used = {k: v for k, v in states["state"].items() if k != "unused"}
    load_dcp({"model": entries, "optim": {"state": used}}, checkpoint_id=tmp_path / "dcp")
    model.load_state_dict(entries, strict=False)
    states["state"].update(used)
    set_optimizer_state_dict(model, optimizer, states)
    for wanted in losses:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(loss.item(), wanted, rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_distributed_format_has_no_state_of_the_loss(crew: Crew, tmp_path: Path) -> None:
    train(crew, tmp_path / "run", Tied(0), hp.optim.adamw(), loss_fn=Scaled())
    told = run("export", tmp_path / "run", tmp_path / "dcp", "--format", "dcp")
    assert "loss.factor (trained by the loss)" in told
    names = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert any(name.startswith("optim.state.near.weight") for name in names)
    assert not [name for name in names if "factor" in name]


def test_states_that_torch_lacks_are_named(crew: Crew, tmp_path: Path) -> None:
    train(crew, tmp_path / "lion", Tied(0), hp.optim.lion(lr=1e-3))
    told = run("export", tmp_path / "lion", tmp_path / "lion.dcp", "--format", "dcp")
    assert "lion.dcp: model of step 2" in told
    assert "the state 'mean'" in told or "the state 'momentum'" in told
    train(crew, tmp_path / "ema", Tied(0), hp.optim.adamw(), ema=0.9)
    told = run("export", tmp_path / "ema", tmp_path / "ema.dcp", "--format", "dcp")
    assert "the state 'average'" in told


def test_a_checkpoint_of_before_is_exported(tmp_path: Path) -> None:
    """It lacks the names of the model's `state_dict`."""
    before = Path(__file__).parents[1] / "data" / "checkpoint"
    told = run("export", before, tmp_path / "folder", "--format", "dcp")
    assert "left out: the optimizer's settings, the loss scale" in told
    run("export", before, tmp_path / "model.pt")
    saved = checkpoint.load(before).tensors["param"]
    state = torch.load(tmp_path / "model.pt")
    assert {name: array.tolist() for name, array in saved.items()} == {
        name: value.tolist() for name, value in state.items()
    }


def test_transformers_reads_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "n_positions": 4, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    config.save_pretrained(tmp_path)
    values = {name: p.detach().numpy() for name, p in model.named_parameters()}
    checkpoint.save(tmp_path, {"param": values, "buffer": {}, "state": {}}, {"step": 1})
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    tokens = torch.arange(4)[None]
    assert torch.equal(read(tokens).logits, model(tokens).logits)


def test_lists(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(
            tmp_path / f"step-{step:08}", {"param": {"w": torch.ones(9).numpy()}}, {"step": step}
        )
    (path,) = (tmp_path / "step-00000002").glob("param-*")
    path.write_bytes(path.read_bytes()[:-4])
    (tmp_path / "step-00000001" / "manifest.json").write_text("{")
    rows = json.loads(run("list", tmp_path, "--json", "-"))["checkpoints"]
    assert [(row["step"], row["valid"]) for row in rows] == [(3, True), (2, False), (1, False)]
    assert rows[0]["nbytes"] == path.stat().st_size + 4
    assert "bytes, not the" in rows[1]["fault"]
    assert "manifest.json" in rows[2]["fault"]
    assert "valid" in run("list", tmp_path)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        run("list", tmp_path / "nowhere")


# Refusals.

BEFORE = Path(__file__).parents[1] / "data" / "checkpoint"


@pytest.mark.parametrize(
    ("target", "options", "match"),
    [
        ("model", (), r"ends with none of \.pt, .*; give --format"),
        ("model.pt", ("--format", "onnx"), "format 'onnx' is not known; "),
        ("full", ("--format", "dcp"), "cannot write .*full: Directory not empty; give a new"),
        ("full", ("--format", "pt"), "cannot write .*full: Is a directory"),
        ("full/file/a.pt", (), "cannot write .*a.pt: File exists"),
        ("full/file/a", ("--format", "dcp"), "cannot write .*a: File exists"),
    ],
)
def test_targets_that_are_refused(
    tmp_path: Path, target: str, options: tuple[str, ...], match: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(HetpipeError, match=match):
        run("export", BEFORE, tmp_path / target, *options)
    assert os.listdir(tmp_path) == ["full"]
    assert os.listdir(tmp_path / "full") == ["file"]


@pytest.mark.parametrize("form", ["pt", "safetensors", "dcp"])
def test_a_full_disk(tmp_path: Path, form: str) -> None:
    tensors = {"param": {"w": torch.ones(50_000).numpy()}, "buffer": {}, "state": {}}
    manifest = {key: v for key, v in checkpoint.load(BEFORE).manifest.items() if key != "names"}
    checkpoint.save(tmp_path / "run", tensors, manifest)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(HetpipeError, match=r"cannot write .*model: "):
            run("export", tmp_path / "run", tmp_path / "model", "--format", form)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["run"]
