"""Parameters and buffers of a loss: trained, saved, resumed and returned as the model's are."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP, batches
from pipelines import pipeline
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.crew.crew import Crew
from hetpipe.errors import CaptureError

LR, NORM, STEPS = 0.2, 1.0, 4


class Centered(nn.Module):
    """Cross entropy with an uncertainty weight, and the distance to centres that are trained."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(()))
        self.centers = nn.Parameter(torch.randn(outputs, outputs))
        self.register_buffer("weight", torch.rand(outputs) + 0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.weight: torch.Tensor
        self.seen: torch.Tensor

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        distance = (out - self.centers[y]).square().sum(1)
        each = F.cross_entropy(out, y, reduction="none") * torch.exp(-self.log_var)
        return (each * self.weight[y] + 0.1 * distance).mean() + self.log_var


def task() -> tuple[nn.Module, Centered, list[Any]]:
    torch.manual_seed(0)
    model, data = MLP(), batches(STEPS)
    return model, Centered(model(data[0][0]).shape[1]), data


def trained(
    model: nn.Module, loss: nn.Module, data: list[Any], microbatches: int
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Plain torch: losses, and the states of model and loss."""
    model, loss = copy.deepcopy((model, loss))
    every = [*model.parameters(), *loss.parameters()]
    decayed = [p for p in every if p is not dict(loss.named_parameters())["log_var"]]
    optimizer = torch.optim.SGD(
        [{"params": decayed, "weight_decay": 0.1}, {"params": [loss.log_var]}], lr=LR
    )
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        found = 0.0
        for rows in torch.arange(len(x)).chunk(microbatches):
            part = loss(model(x[rows]), y[rows]) / microbatches
            part.backward()
            found += part.item()
        torch.nn.utils.clip_grad_norm_(every, NORM)
        optimizer.step()
        losses.append(found)
    return losses, model.state_dict(), loss.state_dict()


def optimizer() -> hp.optim.Optimizer:
    return hp.optim.sgd(lr=LR, weight_decay=0.1, decay_exclude=lambda name: name == "loss.log_var")


@pytest.mark.parametrize("members", ["01", [("m0", "m1"), ("m2", "m3")]])
def test_they_train_as_in_torch(crew: Crew, tmp_path: Path, members: Any) -> None:
    """With a clip over all parameters, a checkpoint half way, and replicas."""
    model, loss, data = task()
    losses, wanted, wanted_of_loss = trained(model, loss, data, 2)
    options = {"clip_norm": NORM, "optimizer": optimizer()}
    with pipeline(crew, model, loss, data[0], members, "1f1b", 2, **options) as pipe:
        found = [pipe.step(x, y) for x, y in data[:2]]
        pipe.save(tmp_path)
    with pipeline(
        crew, model, loss, data[0], members, "1f1b", 2, checkpoint=tmp_path, **options
    ) as pipe:
        found += [pipe.step(x, y) for x, y in data[2:]]
        assert pipe.evaluate(*data[0]) > 0
        assert "loss.centers" in pipe.gradients(*data[0])[1]
        state, state_of_loss = pipe.state_dict(), pipe.loss_state_dict()
    assert found == pytest.approx(losses, rel=1e-5)
    assert abs(wanted_of_loss["log_var"]) > 0.1
    model.load_state_dict(state)  # strictly: the loss adds no name
    loss.load_state_dict(state_of_loss)
    for got, right in ((state, wanted), (state_of_loss, wanted_of_loss)):
        for name, value in right.items():
            if name != "seen":  # each replica counts its own forwards
                torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)
    if members == "01":
        assert state_of_loss["seen"] == 2 * STEPS


def test_they_train_under_an_asynchronous_schedule(crew: Crew) -> None:
    """On one stage nothing is delayed, so the result is that of plain training."""
    model, loss, data = task()
    losses, _, wanted = trained(model, loss, data, 1)
    options = {"clip_norm": NORM, "clip_each": True, "optimizer": optimizer()}
    with pipeline(crew, model, loss, data[0], "0", "pipedream", **options) as pipe:
        assert [r.loss for r in pipe.run(data)] == pytest.approx(losses, rel=1e-5)
        state = pipe.loss_state_dict()
    torch.testing.assert_close(state["centers"], wanted["centers"], rtol=1e-4, atol=1e-6)


def test_a_parameter_of_model_and_loss_has_the_models_name() -> None:
    model, loss, data = task()
    last = list(model.modules())[-1]
    assert isinstance(last, nn.Linear)
    loss.head = last
    found = Captured(model, loss, data[0])
    shared = [name for name, alias in found.aliases.items() if name.startswith("loss.head.")]
    assert len(shared) == 2
    assert not any(name.startswith("loss.head.") for name in found.parameters)


def test_equal_names_are_refused() -> None:
    model, loss, data = task()
    model.add_module("loss", Centered(3))
    with pytest.raises(CaptureError, match=r"log_var would be called loss.log_var .* rename one"):
        Captured(model, loss, data[0])


def test_a_second_start_has_the_present_values_of_the_losss_buffers(tmp_path: Path) -> None:
    """Class weights are values, not code: an earlier capture of the same code has others."""
    model, _, data = task()
    outputs = model(data[0][0]).shape[1]
    for factor in (1.0, 3.0):
        loss = nn.CrossEntropyLoss(weight=torch.full((outputs,), factor))
        found = Captured(model, loss, data[0])
        assert found.buffers["loss.weight"].tolist() == [factor] * outputs
        stages = found.stage_graphs([], [{}], [4], None)
        assert not any(value.shape == (outputs,) for value in stages[0].constants.values())
