"""A model changed after its capture: the next call reports the change."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import user_pipeline
from torch import nn

import hetpipe as hp
from hetpipe.capture.export.model_changes import ModelChangedWarning
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

BATCH = torch.randn(4, 3), torch.randint(2, (4,))


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out / self.temperature, y)


class Model(nn.Module):
    """A model that counts its calls, as users do for logging."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 2))
        self.calls, self.scale, self.mask = 0, 1.0, None
        self.shift = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.mask is None:
            self.mask = torch.ones(2)
        return self.layers(x) * self.scale * self.mask + self.shift


def open_pipeline(crew: Crew, model: nn.Module, loss: nn.Module) -> hp.Pipeline:
    return user_pipeline(crew, model, loss, BATCH, cuts=[1], microbatches=1, schedule="1f1b")


def replaced_layer(model: Any, loss: Any) -> None:
    model.layers[1] = nn.Tanh()


def added_layer(model: Any, loss: Any) -> None:
    model.layers.append(nn.Tanh())


def frozen(model: Any, loss: Any) -> None:
    model.layers[0].weight.requires_grad_(False)


def replaced_parameter(model: Any, loss: Any) -> None:
    model.layers[2].bias = nn.Parameter(torch.zeros(2))


def attribute(model: Any, loss: Any) -> None:
    model.layers[1].p = 0.5


def tensor(model: Any, loss: Any) -> None:
    model.shift = torch.ones(2)


def loss_attribute(model: Any, loss: Any) -> None:
    loss.temperature = 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced_layer, r"layers \(Sequential\) has other layers: 0, 1, 2"),
        (added_layer, r"layers \(Sequential\) has other layers: 0, 1, 2, 3"),
        (frozen, "requires_grad of weight of layers.0 is False and was True"),
        (replaced_parameter, r"layers.2 \(Linear\) has other parameters"),
        (attribute, r"p of layers.1 \(Dropout\) is 0.5 and was 0.0"),
        (tensor, "shift of the model is another tensor"),
        (loss_attribute, r"temperature of the loss \(Loss\) is 1.0 and was 2.0"),
    ],
)
def test_a_change_is_refused(
    crew: Crew, change: Callable[[Any, Any], None], message: str, tmp_path: Path
) -> None:
    model, loss = Model(), Loss()
    with open_pipeline(crew, model, loss) as pipe:
        pipe.step(*BATCH)
        state = pipe.state_dict()
        change(model, loss)
        for call in (pipe.step, lambda *batch: pipe.evaluate([batch]), pipe.gradients):
            with pytest.raises(HetpipeError, match=f"{message}.*make another pipeline"):
                call(*BATCH)
        with pytest.raises(HetpipeError, match=message):
            list(pipe.run([BATCH]))
        pipe.save(tmp_path)  # nothing is lost
        assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())


def test_loaded_values_cause_one_warning(crew: Crew) -> None:
    model, loss = Model(), Loss()
    with open_pipeline(crew, model, loss) as pipe:
        with torch.no_grad():
            model.layers[0].weight.add_(1)
        with pytest.warns(ModelChangedWarning, match=r"layers.0.weight has new values") as caught:
            pipe.step(*BATCH)
        assert caught[0].filename == __file__
        pipe.step(*BATCH)


def test_users_may_still_use_the_model(crew: Crew) -> None:
    """Users may validate between steps.

    They may load the pipeline's values, use eval mode, call the model, move its tensors.
    """
    model, loss = Model(), Loss()
    with open_pipeline(crew, model, loss) as pipe, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            pipe.step(*BATCH)
            model.load_state_dict(pipe.state_dict())
            model.eval()
            loss(model(BATCH[0]), BATCH[1]).backward()
            model.train()
            model.zero_grad()
            copy.deepcopy(model)
            model.double().float()
        assert pipe.evaluate([BATCH]).loss > 0
