"""A pipeline trains with an optimizer and a scheduler of torch as torch's own loop does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from reference import check_close
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import CheckpointError, HetpipeError

DEVICES = ("numpy:cpu:0", "pytorch:cpu:0")
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
Y = torch.tensor([0, 1, 0, 1, 2, 1, 2, 2])
NORM = 0.2
Pair = tuple[torch.optim.Optimizer, LRScheduler]


class Scaled(nn.Module):
    """Cross entropy of the output times a trained factor."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out * self.factor, y)


def model_and_loss() -> tuple[nn.Module, Scaled]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    model[4].weight.requires_grad_(False)
    return model.double(), Scaled()


def warm_up(model: nn.Module, loss: nn.Module, decay: float = 0.5) -> Pair:
    """Return AdamW with two groups, whose learning rates rise in 4 updates."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in [*model.parameters(), *loss.parameters()] if p.ndim < 2]
    groups = [
        {"params": weights, "weight_decay": decay}, {"params": others, "lr": 0.03, "eps": 1e-4},
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def one_cycle(model: nn.Module, loss: nn.Module) -> Pair:
    parameters = [*model.parameters(), *loss.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)
    return optimizer, OneCycleLR(optimizer, 0.4, total_steps=10, cycle_momentum=False)


def trained_by_torch(make: Any, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, loss_fn = model_and_loss()
    optimizer, scheduler = make(model, loss_fn)
    parameters = [*model.parameters(), *loss_fn.parameters()]
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model(X), Y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, NORM)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, {**model.state_dict(), "factor": loss_fn.factor.detach()}


def options(crew: Crew, optimizer: Any, **more: Any) -> dict[str, Any]:
    return {
        "cluster": crew.cluster, "crew": crew, "optimizer": optimizer, "cuts": [2],
        "microbatches": 2, "schedule": "1f1b", "clip_norm": NORM, **more,
    }  # fmt: skip


@pytest.mark.parametrize("make", [warm_up, one_cycle])
def test_a_pipeline_equals_torchs_loop(crew: Crew, make: Any) -> None:
    expected, state = trained_by_torch(make, 10)
    model, loss_fn = model_and_loss()
    optimizer = hp.optim.from_torch(*make(model, loss_fn))
    with hp.Pipeline(model, loss_fn, (X, Y), **options(crew, optimizer)) as pipe:
        losses = [pipe.step(X, Y) for _ in range(10)]
        assert pipe.diagnose(X, Y).verdict == "healthy"
        found = {**pipe.state_dict(), **pipe.loss_state_dict()}
    assert losses == pytest.approx(expected, rel=1e-11)
    check_close(found, state, rtol=1e-10, atol=1e-12)


def test_an_optimizer_without_a_scheduler_is_given_as_it_is(crew: Crew) -> None:
    model, loss_fn = model_and_loss()
    optimizer = torch.optim.RMSprop([*model.parameters(), *loss_fn.parameters()], lr=0.1)
    with hp.Pipeline(model, loss_fn, (X, Y), **options(crew, optimizer)) as pipe:
        losses = [pipe.step(X, Y) for _ in range(5)]
        assert losses[-1] < losses[0]
        assert not optimizer.state


def test_a_checkpoint_continues_with_the_schedule(crew: Crew, tmp_path: Path) -> None:
    _, state = trained_by_torch(warm_up, 6)
    model, loss_fn = model_and_loss()
    optimizer = hp.optim.from_torch(*warm_up(model, loss_fn))
    with hp.Pipeline(model, loss_fn, (X, Y), **options(crew, optimizer)) as pipe:
        for _ in range(2):
            pipe.step(X, Y)
        pipe.save(tmp_path)
    model, loss_fn = model_and_loss()
    optimizer = hp.optim.from_torch(*warm_up(model, loss_fn))
    more = options(crew, optimizer)
    with hp.Pipeline.load(tmp_path, model, loss_fn, (X, Y), **more) as pipe:
        for _ in range(4):
            pipe.step(X, Y)
        found = {**pipe.state_dict(), **pipe.loss_state_dict()}
    check_close(found, state, rtol=1e-10, atol=1e-12)
    for other, message in [
        (hp.optim.from_torch(*warm_up(model, loss_fn, 0.25)), "optimizer.weight_decay=0.5, and"),
        (hp.optim.adamw(lr=0.1, weight_decay=0.5), "optimizer.groups=[['0.bias', '2.bias', "),
    ]:
        with pytest.raises(CheckpointError) as caught:
            hp.Pipeline.load(tmp_path, model, loss_fn, (X, Y), **options(crew, other))
        assert f"the checkpoint was trained with {message}" in str(caught.value)


def test_optimizers_that_do_not_fit_are_refused(crew: Crew) -> None:
    model, loss_fn = model_and_loss()
    parameters = [*model.parameters(), *loss_fn.parameters()]
    scheduled, _ = one_cycle(model, loss_fn)
    for optimizer, message in [
        (torch.optim.SGD(parameters[:-1]), "1 trained parameters are in no group .*: loss.factor;"),
        (torch.optim.SGD(nn.Linear(2, 2).parameters()), "group 0 of the optimizer has a parameter"),
        (torch.optim.RAdam(parameters), "hetpipe has no torch.optim.RAdam"),
        (scheduled, "torch.optim.SGD has a scheduler, .* write optimizer=hp.optim.from_torch"),
    ]:
        with pytest.raises(HetpipeError, match=message):
            hp.Pipeline(model, loss_fn, (X, Y), **options(crew, optimizer))
