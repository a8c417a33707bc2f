"""Clipping by the norm over all stages, or over each stage, equals torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models import CASES, MLP, batches
from pipelines import pipeline
from reference import Parameters, check_close, train
from torch.nn.utils import clip_grad_norm_

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

LR = 0.1
SGD = hp.optim.sgd(lr=LR)


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "members"), [("1f1b", "012"), ("interleaved", "0101")])
@pytest.mark.parametrize(("case", "norm"), [("mlp", 0.3), ("tied_autoencoder", 0.1)])
def test_the_norm_over_all_stages(
    crew: Crew, schedule: str, members: str, case: str, norm: float
) -> None:
    torch.manual_seed(0)
    model, loss_fn, data = MLP(), F.cross_entropy, batches(4)
    if case != "mlp":
        found = CASES[case]
        generator = torch.Generator().manual_seed(1)
        model, loss_fn = found.model(), found.loss_fn
        data = [found.batch(generator) for _ in range(4)]
    norms: list[float] = []
    expected = train(
        model, loss_fn, data, 4, sgd,
        before_step=lambda p: norms.append(float(clip_grad_norm_(p, norm))),
    )  # fmt: skip
    assert max(norms) > 2 * norm  # clipping has an effect
    with pipeline(
        crew, model, loss_fn, data[0], members, schedule, 4, clip_norm=norm, optimizer=SGD
    ) as pipe:
        for x, y in data:
            pipe.step(x, y)
        state = pipe.state_dict()
    check_close(state, expected.state)


def test_the_norm_of_each_stage(crew: Crew) -> None:
    torch.manual_seed(0)
    model, data = MLP(), batches(4)
    with pipeline(
        crew, model, F.cross_entropy, data[0], "01", "pipedream", clip_norm=0.05, clip_each=True,
        optimizer=SGD,
    ) as pipe:  # fmt: skip
        lo = pipe.plan.stages[1].lo
        second = tuple(f"{layer}." for layer in pipe.plan.layers[lo:])
        for x, y in data:
            pipe.step(x, y)
        state = pipe.state_dict()
    norms: list[list[float]] = []

    def clip_stages(parameters: Parameters) -> None:
        groups: list[Parameters] = [[], []]
        for (name, _), parameter in zip(model.named_parameters(), parameters, strict=True):
            groups[name.startswith(second)].append(parameter)
        assert all(groups)
        norms.append([float(clip_grad_norm_(group, 0.05)) for group in groups])

    expected = train(model, F.cross_entropy, data, 1, sgd, before_step=clip_stages)
    assert min(map(max, zip(*norms, strict=True))) > 0.05
    check_close(state, expected.state)


def test_invalid_clipping_is_refused(crew: Crew) -> None:
    task = MLP(), F.cross_entropy, batches(1)[0], "01"
    with pytest.raises(HetpipeError, match="clip each stage alone with clip_each=True"):
        pipeline(crew, *task, "pipedream", clip_norm=1.0, optimizer=SGD)
    with pytest.raises(HetpipeError, match="clip_norm=0"):
        pipeline(crew, *task, "1f1b", 4, clip_norm=0, optimizer=SGD)
