"""Parameters and buffers of a loss are trained, saved, resumed and returned like the model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP, batches
from pipelines import pipeline
from reference import Parameters, Trained, check_close, train
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.crew.crew import Crew
from hetpipe.errors import CaptureError

LR, NORM, STEPS = 0.2, 1.0, 4


class Centered(nn.Module):
    """Cross entropy with a trained uncertainty weight, and the distance to trained centres."""

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


def train_in_torch(
    model: nn.Module, loss: nn.Module, data: list[Any], microbatches: int
) -> Trained:
    """Train in plain torch; the only scalar, `log_var`, does not decay."""

    def sgd(parameters: Parameters) -> torch.optim.Optimizer:
        decayed = {"params": [p for p in parameters if p.ndim], "weight_decay": 0.1}
        return torch.optim.SGD([decayed, {"params": [p for p in parameters if not p.ndim]}], lr=LR)

    return train(
        model, loss, data, microbatches, sgd,
        before_step=lambda p: torch.nn.utils.clip_grad_norm_(p, NORM),
    )  # fmt: skip


def optimizer() -> hp.optim.Optimizer:
    return hp.optim.sgd(lr=LR, weight_decay=0.1, decay_exclude=lambda name: name == "loss.log_var")


@pytest.mark.slow
@pytest.mark.parametrize("members", ["01", [("m0", "m1"), ("m2", "m3")]])
def test_loss_parameters_train_as_in_torch(crew: Crew, tmp_path: Path, members: Any) -> None:
    """Training includes clipping over all parameters, a checkpoint half-way, and replicas."""
    model, loss, data = task()
    expected = train_in_torch(model, loss, data, 2)
    options = {"clip_norm": NORM, "optimizer": optimizer()}
    with pipeline(crew, model, loss, data[0], members, "1f1b", 2, **options) as pipe:
        found = [pipe.step(x, y) for x, y in data[:2]]
        pipe.save(tmp_path)
    with pipeline(
        crew, model, loss, data[0], members, "1f1b", 2, checkpoint=tmp_path, **options
    ) as pipe:
        found += [pipe.step(x, y) for x, y in data[2:]]
        assert pipe.evaluate([data[0]]).loss > 0
        assert "loss.centers" in pipe.gradients(*data[0])[1]
        state, loss_state = pipe.state_dict(), pipe.loss_state_dict()
    assert found == pytest.approx(expected.losses, rel=1e-5)
    assert abs(expected.loss_state["log_var"]) > 0.1
    model.load_state_dict(state)  # strict: the loss adds no name
    loss.load_state_dict(loss_state)
    if members == "01":
        assert loss_state["seen"] == 2 * STEPS
    expected.loss_state.pop("seen")  # each replica counts its own forwards
    check_close(state, expected.state)
    check_close(loss_state, expected.loss_state)


def test_loss_parameters_train_under_an_asynchronous_schedule(crew: Crew) -> None:
    """On one stage nothing is delayed, so the result equals plain training."""
    model, loss, data = task()
    expected = train_in_torch(model, loss, data, 1)
    options = {"clip_norm": NORM, "clip_each": True, "optimizer": optimizer()}
    with pipeline(crew, model, loss, data[0], "0", "pipedream", **options) as pipe:
        assert [r.loss for r in pipe.run(data)] == pytest.approx(expected.losses, rel=1e-5)
        assert pipe.diagnose(*data[0]).verdict == "healthy"
        state = pipe.loss_state_dict()
    centers = expected.loss_state["centers"]
    torch.testing.assert_close(state["centers"], centers, rtol=1e-4, atol=1e-6)


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


def test_a_cached_capture_takes_the_current_loss_buffers(tmp_path: Path) -> None:
    """Class weights are values, not code, so an earlier capture of this code has other values."""
    model, _, data = task()
    outputs = model(data[0][0]).shape[1]
    for factor in (1.0, 3.0):
        loss = nn.CrossEntropyLoss(weight=torch.full((outputs,), factor))
        found = Captured(model, loss, data[0])
        assert found.buffers["loss.weight"].tolist() == [factor] * outputs
        stages = found.stage_graphs([], [{}], [4], None)
        assert not any(value.shape == (outputs,) for value in stages[0].constants.values())
