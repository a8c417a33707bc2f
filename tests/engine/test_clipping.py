"""Clipping by the norm over all stages equals torch's; by stage, torch's on each stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES, MLP, batches
from pipelines import pipeline
from reference import cut, leaf, sizes

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

LR = 0.1
SGD = hp.optim.sgd(lr=LR)


def clipped(model: Any, loss_fn: Any, data: Any, groups: Any, norm: float, count: int) -> list[Any]:
    """Plain torch; the norms before clipping, per step and group of parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for x, y in data:
        optimizer.zero_grad()
        rows, lo = leaf(x).shape[0], 0
        for size in sizes(rows, count):
            found = loss_fn(model(cut(x, lo, lo + size)), cut(y, lo, lo + size))
            (found * (size / rows)).backward()
            lo += size
        norms.append([float(torch.nn.utils.clip_grad_norm_(g, norm)) for g in groups])
        optimizer.step()
    return norms


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
    eager = copy.deepcopy(model)
    norms = clipped(eager, loss_fn, data, [list(eager.parameters())], norm, 4)
    assert max(norms)[0] > 2 * norm  # it matters
    with pipeline(
        crew, model, loss_fn, data[0], members, schedule, 4, clip_norm=norm, optimizer=SGD
    ) as pipe:
        for x, y in data:
            pipe.step(x, y)
        state = pipe.state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def test_each_stage_by_itself(crew: Crew) -> None:
    torch.manual_seed(0)
    model, data = MLP(), batches(4)
    eager = copy.deepcopy(model)
    with pipeline(
        crew, model, F.cross_entropy, data[0], "01", "pipedream", clip_norm=0.05, clip_each=True,
        optimizer=SGD,
    ) as pipe:  # fmt: skip
        lo = pipe.plan.stages[1].lo
        names = pipe.plan.layers[lo:]
        for x, y in data:
            pipe.step(x, y)
        state = pipe.state_dict()
    groups: list[list[Any]] = [[], []]
    for name, parameter in eager.named_parameters():
        groups[any(name.startswith(f"{layer}.") for layer in names)].append(parameter)
    assert all(groups)
    norms = clipped(eager, F.cross_entropy, data, groups, 0.05, 1)
    assert min(map(max, zip(*norms, strict=True))) > 0.05
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_clipped_is_refused(crew: Crew) -> None:
    task = MLP(), F.cross_entropy, batches(1)[0], "01"
    with pytest.raises(HetpipeError, match="clip each stage's with clip_each=True"):
        pipeline(crew, *task, "pipedream", clip_norm=1.0, optimizer=SGD)
    with pytest.raises(HetpipeError, match="clip_norm=0"):
        pipeline(crew, *task, "1f1b", 4, clip_norm=0, optimizer=SGD)
