"""`check_optimizer` refuses everything except optimizers of hetpipe, and names the line to
write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetpipe import optim
from hetpipe.errors import HetpipeError
from hetpipe.optim.check import check_optimizer

WEIGHTS = [torch.zeros(2, requires_grad=True)]


@pytest.mark.parametrize(
    ("value", "described", "cure"),
    [
        (None, "optimizer is None;", "write hp.optim.adamw(lr=1e-3), or another of adagrad, "),
        ("adam", "optimizer is 'adam';", "hp.optim.adamw(lr=1e-3), or"),
        (1e-3, "optimizer is 0.001;", "hp.optim.adamw(lr=1e-3), or"),
        (
            torch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9, nesterov=True),
            "optimizer is torch.optim.SGD",
            "write hp.optim.sgd(lr=0.1, momentum=0.9, nesterov=True)",
        ),
        (
            torch.optim.AdamW(WEIGHTS, lr=0.02),
            "torch.optim.AdamW",
            "hp.optim.adamw(lr=0.02, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01)",
        ),
        (torch.optim.Adam, "torch.optim.Adam,", "hp.optim.adam(lr=1e-3)"),
        (torch.optim.LBFGS(WEIGHTS), "torch.optim.LBFGS", "hp.optim.adamw(lr=1e-3), or another"),
        (optim.sgd, "the function sgd itself", "hp.optim.sgd(lr=1e-3)"),
        (WEIGHTS, "optimizer is a list;", "hp.optim.adamw(lr=1e-3), or"),
        (lambda: None, "optimizer is a function;", "hp.optim.adamw(lr=1e-3), or"),
    ],
)
def test_other_values_are_refused_with_the_line_to_write(
    value: Any, described: str, cure: str
) -> None:
    with pytest.raises(HetpipeError) as caught:
        check_optimizer(value)
    assert described in str(caught.value)
    assert cure in str(caught.value)


def trained_by_torch(
    optimizer: torch.optim.Optimizer, weights: torch.Tensor, steps: int
) -> torch.Tensor:
    for step in range(steps):
        weights.grad = torch.linspace(-1, 2, 6, dtype=weights.dtype).roll(step) * (step + 1)
        optimizer.step()
    return weights.detach()


def trained_by_rule(rule: optim.Optimizer, weights: torch.Tensor, steps: int) -> torch.Tensor:
    state = tuple(torch.zeros_like(weights) for _ in rule.state)
    for step in range(steps):
        grad = torch.linspace(-1, 2, 6, dtype=weights.dtype).roll(step) * (step + 1)
        number = torch.tensor(step + 1.0, dtype=weights.dtype)
        lr = torch.tensor(rule.lr_at(step + 1), dtype=weights.dtype)
        weights, state = rule.update(weights, grad, state, number, lr)
    return weights


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"lr": 0.1, "dampening": 0.5}),  # dampening without momentum
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
        ("Adam", {}),
        ("Adam", {"lr": torch.tensor(0.01, dtype=torch.float64), "foreach": False}),
        ("Adam", {"weight_decay": 0.1}),
        ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        ("AdamW", {"weight_decay": 0.0}),
        ("AdamW", {"lr": 1e-2, "betas": (0.5, 0.9), "eps": 1e-3}),
        ("RMSprop", {"momentum": 0.5, "alpha": 0.9}),
        ("Adagrad", {"lr": 0.1, "lr_decay": 0.5, "weight_decay": 0.1}),
    ],
)
def test_the_suggested_line_trains_as_torch_does(kind: str, settings: dict[str, Any]) -> None:
    weights = torch.linspace(1, -3, 6, dtype=torch.float64)
    theirs = weights.clone().requires_grad_()
    optimizer = getattr(torch.optim, kind)([theirs], **settings)
    with pytest.raises(HetpipeError) as caught:
        check_optimizer(optimizer, [theirs])
    ours = eval(str(caught.value).partition("write hp.")[2], {"optim": optim})
    expected = trained_by_torch(optimizer, theirs, 5)
    torch.testing.assert_close(trained_by_rule(ours, weights, 5), expected, rtol=1e-12, atol=1e-13)


GROUPS: Any = [{"params": WEIGHTS}, {"params": [torch.zeros(2)], "lr": 1.0, "weight_decay": 0}]


@pytest.mark.parametrize(
    ("theirs", "lost"),
    [
        (torch.optim.SGD(WEIGHTS, maximize=True), "maximize=True"),
        (torch.optim.SGD(WEIGHTS, momentum=0.9, dampening=0.9), "dampening=0.9"),
        (torch.optim.Adam(WEIGHTS, amsgrad=True), "amsgrad=True"),
        (torch.optim.RMSprop(WEIGHTS, centered=True), "centered=True"),
        (torch.optim.Adagrad(WEIGHTS, initial_accumulator_value=1.0), "initial_accumulator_value="),
        (torch.optim.AdamW(GROUPS), "groups of parameters with different lr and weight_decay"),
    ],
)
def test_settings_that_would_be_lost_are_named_without_a_line(theirs: Any, lost: str) -> None:
    with pytest.raises(HetpipeError) as caught:
        check_optimizer(theirs)
    assert f"trains differently, because it lacks {lost}" in str(caught.value)
    assert "write" not in str(caught.value)


def test_steps_schedules_and_missing_parameters_are_named() -> None:
    weights, frozen = torch.ones(6, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = torch.optim.Adam([weights])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trained_by_torch(optimizer, weights, 1)
    with pytest.raises(HetpipeError) as caught:
        check_optimizer(optimizer, [weights, frozen])
    for lost in ("schedule of its learning rate", "state of its earlier steps", "leaves 1 out"):
        assert lost in str(caught.value)


def test_settings_must_be_numbers() -> None:
    for make in (optim.sgd, optim.adam, optim.adamw, optim.rmsprop, optim.adagrad, optim.lion):
        with pytest.raises(HetpipeError, match=r"lr is '1e-3', a str: give a number, as float"):
            make(lr="1e-3")
    with pytest.raises(HetpipeError, match=r"betas is \(0.9,\): give two numbers"):
        optim.adam(betas=(0.9,))
    with pytest.raises(HetpipeError, match="eps must be finite"):
        optim.adam(eps=float("nan"))
    assert optim.sgd(lr=torch.tensor([0.5])).lr == 0.5
    assert optim.sgd(lr=lambda step: torch.tensor(0.5)).lr_at(1) == 0.5
