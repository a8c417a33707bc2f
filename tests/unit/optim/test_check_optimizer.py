"""`check_optimizer` accepts optimizers of hetpipe and of torch, and refuses everything else."""

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
        (None, "optimizer is None;", "write hp.optim.adamw(lr=1e-3), or another of adadelta, "),
        ("adam", "optimizer is 'adam';", "hp.optim.adamw(lr=1e-3), or"),
        (1e-3, "optimizer is 0.001;", "hp.optim.adamw(lr=1e-3), or"),
        (torch.optim.Adam, "the class Adam itself", "torch.optim.Adam(model.parameters())"),
        (optim.sgd, "the function sgd itself", "hp.optim.sgd(lr=1e-3)"),
        (optim.Optimizer, "the class Optimizer itself", "hp.optim.adamw(lr=1e-3), or"),
        (WEIGHTS, "optimizer is a list;", "hp.optim.adamw(lr=1e-3), or"),
        (lambda: None, "optimizer is a function;", "hp.optim.adamw(lr=1e-3), or"),
    ],
)
def test_other_values_are_refused_with_the_line_to_write(
    value: Any, described: str, cure: str
) -> None:
    with pytest.raises(HetpipeError) as caught:
        check_optimizer(value, {})
    assert described in str(caught.value)
    assert cure in str(caught.value)


def test_an_optimizer_of_hetpipe_is_returned_as_it_is() -> None:
    rule = optim.lion()
    assert check_optimizer(rule, {"a": WEIGHTS[0]}) is rule


def test_an_optimizer_of_torch_becomes_one_of_hetpipe() -> None:
    rule = check_optimizer(torch.optim.SGD(WEIGHTS, lr=0.5), {"a": WEIGHTS[0]})
    assert (rule.name, rule.lr_at(1)) == ("sgd", 0.5)


def test_weights_in_float16_are_refused() -> None:
    """Adam divides by a square that underflows there: its first updates would give NaN."""
    weight = torch.nn.Parameter(torch.ones(2).half())
    with pytest.raises(HetpipeError, match=r"head is a torch.float16 parameter.*model\.float\(\)"):
        check_optimizer(optim.adamw(lr=0.1), {"head": weight})
    frozen = weight.detach()
    assert check_optimizer(optim.sgd(lr=0.1), {"head": frozen})


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


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (
            optim.sgd,
            {"momentum": 0.9, "dampening": -1},
            "dampening must be finite and not negative",
        ),
        (
            optim.sgd,
            {"momentum": 0.9, "nesterov": True, "dampening": 0.5},
            "no dampening, but momentum is 0.9 and dampening 0.5",
        ),
        (
            optim.adagrad,
            {"lr_decay": -0.5},
            "lr_decay must be finite and not negative, but is -0.5",
        ),
        (optim.adagrad, {"initial_accumulator_value": -1}, "initial_accumulator_value must be"),
        (optim.adadelta, {"rho": 1.0}, r"rho must lie in \[0, 1\), not 1.0"),
        (optim.nadam, {"momentum_decay": "a"}, "momentum_decay is 'a', a str: give a number"),
        (optim.adamax, {"betas": (0.9, 1.0)}, "betas must lie in"),
    ],
)
def test_invalid_settings_are_refused(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(HetpipeError, match=message):
        make(lr=0.1, **settings)
