"""`diagnose` compares pipelines with a loss over whole mini-batches with plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from crews import Crews
from pipelines import user_pipeline
from test_whole_loss import (
    Failing,
    Headed,
    Masked,
    classes,
    counted,
    infinite,
    spread,
    towers,
    weighted,
)
from torch import nn
from wrong_backends import WrongBackend

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import WholeLoss
from hetpipe.errors import HetpipeError
from hetpipe.pipeline import training as trainings
from hetpipe.sdk.host import registry


@pytest.fixture(autouse=True, scope="module")
def wrong() -> None:
    registry.register_backend(WrongBackend)


def opened(crew: Crew, model: nn.Module, loss: Any, example: Any, **options: Any) -> hp.Pipeline:
    options = {"optimizer": hp.optim.adam(lr=1e-2), "microbatches": 3, "cuts": [1], **options}
    return user_pipeline(crew, model, loss, example, loss_over="mini-batch", **options)


def headed() -> tuple[nn.Module, Any, list[Any]]:
    _, data = classes()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh()).double()
    return model, Headed(model[0]).double(), data


def tied() -> tuple[nn.Module, Any, list[Any]]:
    model, data = classes(tied=True)
    return model, weighted, data


def normed() -> tuple[nn.Module, Any, list[Any]]:
    model, data = classes(torch.float32, normed=True)
    return model, counted, data


@pytest.mark.parametrize("case", [towers, headed, tied, normed])
def test_a_right_pipeline_is_healthy(crew: Crew, case: Any) -> None:
    """The loss of the diagnosis is the loss of the next step, and the training does not change."""
    model, loss, data = case()
    with opened(crew, model, loss, data[0], clip_norm=0.5) as pipe:
        pipe.step(*data[1])
        found = pipe.diagnose(*data[0])
        assert (found.verdict, found.notes) == ("healthy", ()), str(found)
        assert found.loss == pipe.step(*data[0])


def test_outputs_need_not_be_finite(crew: Crew) -> None:
    _, data = classes()
    with opened(crew, Masked().double(), infinite, data[0], cuts=[]) as pipe:
        assert pipe.diagnose(*data[0]).verdict == "healthy"


def test_a_faulty_operator_is_named(crews: Crews) -> None:
    model, loss, data = towers(dtype=torch.float32)
    with opened(crews(("numpy:cpu:0", "wrong:tanh:0")), model, loss, data[0], cuts=[2]) as pipe:
        found = pipe.diagnose(*data[0])
        assert found.culprit is not None
        assert found.culprit.operators == ("aten.tanh.default",)
        assert (found.culprit.stage, found.culprit.member) == (1, "m1")


@pytest.mark.parametrize(
    ("part", "text"), [("loss", "its loss is"), ("gradients", "its gradient of last.bias")]
)
def test_a_wrong_loss_or_gradient_is_found(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, part: str, text: str
) -> None:
    """The programs are right, but get a wrong loss, or wrong gradients of the loss."""
    make = trainings.whole_loss_of

    def faulty(*arguments: Any) -> Any:
        right = make(*arguments)
        assert right is not None

        def compute(outputs: Any) -> WholeLoss:
            whole = right(outputs)
            if part == "loss":
                return replace(whole, loss=1.5 * whole.loss)
            feeds = [{n: np.asarray(a * 1.5) for n, a in feed.items()} for feed in whole.feeds]
            return replace(whole, feeds=feeds)

        return compute

    monkeypatch.setattr(trainings, "whole_loss_of", faulty)
    model, data = classes()
    with opened(crew, model, weighted, data[0]) as pipe:
        found = pipe.diagnose(*data[0])
        assert found.verdict == "capture"
        assert found.detail.startswith(text)


def test_a_loss_that_is_not_finite_is_shown(crew: Crew) -> None:
    model, data = classes()
    labels = data[0][1].clone()
    with opened(crew, model, Failing(), data[0]) as pipe:
        labels[0] = -2
        found = pipe.diagnose(data[0][0], labels)
        assert found.verdict == "numbers"
        assert "the loss of the mini-batch is" in str(found)
        labels[:] = -1
        with pytest.raises(HetpipeError, match="loss_fn fails for the outputs"):
            pipe.diagnose(data[0][0], labels)


def test_a_random_loss_leaves_out_the_comparison_with_the_module(crew: Crew) -> None:
    _, data = classes()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    with opened(crew, model, spread, data[0]) as pipe:
        found = pipe.diagnose(*data[0])
        assert found.verdict == "healthy"
        assert "loss_fn draws random numbers" in str(found)


def test_half_precision_is_compared(crews: Crews) -> None:
    model, loss, data = towers(dtype=torch.float32)
    crew = crews(("pytorch:cpu:0",) * 2)
    with opened(crew, model, loss, data[0], precision="bfloat16", loss_scale=8.0) as pipe:
        found = pipe.diagnose(*data[0])
        assert (found.verdict, found.notes) == ("healthy", ()), str(found)
