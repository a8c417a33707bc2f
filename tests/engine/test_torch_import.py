"""A pipeline continues from a folder of `torch.distributed.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captures import shared
from test_torch_files import PAIRS, P, Scaled, Tied, X, Y, run, train
from torch import nn
from torch.distributed.checkpoint import save as save_dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import CheckpointError

DEVICES = ("numpy:cpu:0", "pytorch:cpu:0")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def open_pipeline(crew: Crew, rule: Any = None, **options: Any) -> hp.Pipeline:
    loss_fn = options.pop("loss_fn", nn.functional.cross_entropy)
    return hp.Pipeline(
        Tied(1), loss_fn, (X, Y), cluster=crew.cluster, crew=crew, cuts=[2], microbatches=1,
        optimizer=rule or hp.optim.adamw(**P), schedule="1f1b",
        captured=shared(Tied(1), loss_fn, (X, Y)), **options,
    )  # fmt: skip


def write(folder: Path, state: dict[str, Any]) -> Path:
    save_dcp(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("name", ["sgd", "adamw", "rmsprop"])
def test_a_training_of_torch_is_continued(crew: Crew, tmp_path: Path, name: str) -> None:
    ours, theirs, settings = PAIRS[name]
    model = Tied(0)
    optimizer = theirs([p for p in model.parameters() if p.requires_grad], **P, **settings)

    def step() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        return loss.item()

    step()
    step()
    states = get_optimizer_state_dict(model, optimizer)
    write(tmp_path / "dcp", {"model": model.state_dict(), "optimizer": states})
    with open_pipeline(crew, ours(**P, **settings)) as pipe:
        assert pipe.restore(tmp_path / "dcp", format="dcp") == {}
        assert pipe.steps == (0 if name == "sgd" else 2)
        for _ in range(2):
            torch.testing.assert_close(pipe.step(X, Y), step(), rtol=1e-5, atol=0)


def test_an_export_is_continued_bit_for_bit(crew: Crew, tmp_path: Path) -> None:
    """Tensors of the loss keep their values; the average begins with the parameters."""
    rule = hp.optim.adamw(**P)
    state, losses = train(crew, tmp_path / "run", Tied(0), rule)
    run("export", tmp_path / "run", tmp_path / "dcp", "--format", "dcp")
    with open_pipeline(crew, ema=0.5) as pipe:
        pipe.restore(tmp_path / "dcp", format="dcp")
        used = [name for name in state if name != "unused"]
        assert all(torch.equal(pipe.state_dict()[name], state[name]) for name in used)
        average = pipe.ema_state_dict()
        assert all(torch.equal(average[name], state[name]) for name in used)
        assert [pipe.step(X, Y) for _ in losses] == losses
    with open_pipeline(crew, loss_fn=Scaled()) as pipe:
        pipe.step(X, Y)
        factor = pipe.loss_state_dict()
        pipe.restore(write(tmp_path / "plain", Tied(0).state_dict()), format="dcp")
        assert pipe.loss_state_dict() == factor


def test_a_model_without_states_begins_an_optimizer(
    crew: Crew, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = {name: value.bfloat16() for name, value in Tied(0).state_dict().items()}
    half["norm.num_batches_tracked"] = Tied(0).state_dict()["norm.num_batches_tracked"]
    write(tmp_path / "dcp", {"model": half})
    with open_pipeline(crew) as pipe:
        pipe.step(X, Y)
        pipe.restore(tmp_path / "dcp", format="dcp")
        assert "the optimizer's states begin at zero" in caplog.text
        assert pipe.steps == 0
        assert torch.equal(pipe.state_dict()["norm.weight"], half["norm.weight"].float())
        wanted = [pipe.step(X, Y) for _ in range(2)]
    model = Tied(1)
    model.load_state_dict({name: value.float() for name, value in half.items()})
    with hp.Pipeline(
        model, nn.functional.cross_entropy, (X, Y), cluster=crew.cluster, crew=crew, cuts=[2],
        microbatches=1, optimizer=hp.optim.adamw(**P), schedule="1f1b",
    ) as pipe:  # fmt: skip
        assert [pipe.step(X, Y) for _ in range(2)] == wanted


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"norm.weight": None}, r"dcp lacks norm\.weight: give a folder of this model"),
        ({"norm.weight": torch.ones(7)}, r"norm\.weight is torch\.float32\[7\] in .*\[6\] in the"),
        ({"norm.weight": torch.ones(6).double()}, r"is torch\.float64\[6\] in .*torch\.float32"),
        ({"norm.weight": 3.0}, r"norm\.weight is torch\.int64\[\] in"),
    ],
)
def test_another_model_changes_nothing(
    crew: Crew, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    state = {**Tied(0).state_dict(), **change}
    write(tmp_path / "dcp", {"model": {n: v for n, v in state.items() if v is not None}})
    with open_pipeline(crew) as pipe:
        before = pipe.state_dict()
        with pytest.raises(CheckpointError, match=match):
            pipe.restore(tmp_path / "dcp", format="dcp")
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())
        pipe.step(X, Y)


def test_damaged_folders(crew: Crew, tmp_path: Path) -> None:
    write(tmp_path / "dcp", {"model": Tied(0).state_dict()})
    with open_pipeline(crew) as pipe:
        with pytest.raises(CheckpointError, match=r"nowhere is no folder of torch\.distributed"):
            pipe.restore(tmp_path / "nowhere", format="dcp")
        with pytest.raises(CheckpointError, match="format='pt' is not known; give 'dcp'"):
            pipe.restore(tmp_path / "dcp", format="pt")
        (data,) = (tmp_path / "dcp").glob("*.distcp")
        data.write_bytes(data.read_bytes()[:100])
        with pytest.raises(CheckpointError, match=r"cannot read .*dcp: "):
            pipe.restore(tmp_path / "dcp", format="dcp")
        metadata = tmp_path / "dcp" / ".metadata"
        newer = metadata.read_bytes().replace(b"torch.distributed", b"torcx.distributed")
        for content in (b"\x80\x04", newer):
            metadata.write_bytes(content)
            with pytest.raises(CheckpointError, match="is no folder of"):
                pipe.restore(tmp_path / "dcp", format="dcp")
        pipe.step(X, Y)
