"""`from_torch` reads groups, settings and learning rates; then a rule trains as torch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hetpipe import optim
from hetpipe.errors import HetpipeError
from hetpipe.optim import Optimizer, from_torch

UPDATES = 200
DECAY = {"weight_decay": 0.1}
ADAMS = [
    {}, DECAY, {"betas": (0.5, 0.9), "eps": 1e-3}, {"maximize": True, **DECAY},
    {"betas": (0.0, 0.99)}, {"lr": torch.tensor(0.01, dtype=torch.float64), "foreach": False},
]  # fmt: skip
CASES: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {}, {"dampening": 0.5}, {"momentum": 0.9, **DECAY}, {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "dampening": 0.3, **DECAY}, {"momentum": 0.9, "dampening": 0.9},
        {"momentum": 0.9, "maximize": True, **DECAY}, {"momentum": 0.9, "foreach": True},
    ],
    "Adam": [
        *ADAMS, {"amsgrad": True, **DECAY}, {"decoupled_weight_decay": True, **DECAY},
        {"amsgrad": True, "maximize": True, "betas": (0.9, 0.7)},
    ],
    "AdamW": [*ADAMS, {"amsgrad": True}, {"weight_decay": 0.0}],
    "NAdam": [
        *ADAMS[:4], {"decoupled_weight_decay": True, **DECAY}, {"momentum_decay": 0.1},
    ],
    "Adamax": ADAMS,
    "RMSprop": [
        {}, {"momentum": 0.5, "alpha": 0.9}, {"centered": True, **DECAY},
        {"centered": True, "momentum": 0.5, "maximize": True},
    ],
    "Adagrad": [
        {}, {"lr_decay": 0.5, **DECAY}, {"initial_accumulator_value": 0.5, "maximize": True},
        {"initial_accumulator_value": 2.0, "lr_decay": 0.01, "lr": 0.1},
    ],
    "Adadelta": [{}, {"rho": 0.5, "eps": 1e-3, **DECAY}, {"maximize": True}],
}  # fmt: skip


def gradients(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(UPDATES)]


def trained_by_rule(rule: Optimizer, weights: torch.Tensor) -> torch.Tensor:
    state = tuple(torch.zeros_like(weights) for _ in rule.state)
    for number, gradient in enumerate(gradients(tuple(weights.shape)), 1):
        scalars = (
            torch.tensor(value, dtype=torch.float64) for value in (number, rule.lr_at(number))
        )
        weights, state = rule.update(weights, gradient, state, *scalars)
    return weights


def trained_by_torch(
    optimizer: torch.optim.Optimizer,
    weights: torch.Tensor,
    after_step: Callable[[], Any] = lambda: None,
) -> torch.Tensor:
    for gradient in gradients(tuple(weights.shape)):
        weights.grad = gradient.clone()
        optimizer.step()
        after_step()
    return weights.detach()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(kind, settings) for kind, cases in CASES.items() for settings in cases],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_a_rule_trains_as_torch_does(kind: str, settings: dict[str, Any]) -> None:
    start = torch.linspace(1, -3, 6, dtype=torch.float64)
    weights = start.clone().requires_grad_()
    optimizer = getattr(torch.optim, kind)([weights], **settings)
    rule = from_torch(optimizer).named({"w": weights})
    expected = trained_by_torch(optimizer, weights)
    found = trained_by_rule(rule, start)
    # torch multiplies NAdam's momentum factors in float32.
    rtol, atol = (1e-9, 1e-10) if kind == "NAdam" else (1e-12, 1e-13)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    assert float((expected - start).abs().max()) > 1e-3


class Tied(nn.Module):
    """Two layers with one weight under two names, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)


def names(model: nn.Module, loss: nn.Module | None = None) -> dict[str, torch.Tensor]:
    own = dict(model.named_parameters())
    return own | {f"loss.{n}": p for n, p in (loss or nn.Identity()).named_parameters()}


def groups(model: nn.Module, **more: Any) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": weights}, {"params": biases, "weight_decay": 0.0, **more}]


def test_groups_have_their_own_settings_and_learning_rates() -> None:
    model, loss = Tied(), nn.Linear(3, 3)
    more = groups(loss, betas=(0.5, 0.6), lr=0.25, eps=torch.tensor(0.125), amsgrad=True)
    optimizer = torch.optim.AdamW([*groups(model), more[1], {"params": [loss.weight]}], lr=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    rule = from_torch(optimizer).named(names(model, loss))
    assert optimizer.state_dict() == before
    assert rule.members(names(model, loss)) == [
        ["first.bias", "second.bias"], ["loss.bias"], ["loss.weight"],
    ]  # fmt: skip
    assert [each.lr_at(1) for each in rule.rules] == [0.5, 0.5, 0.25, 0.5]
    assert rule.rates_at(7) == {"lr": 0.5, "lr.1": 0.25}
    assert rule.rule_for("loss.bias").state == ("mean", "square", "largest")
    assert rule.rule_for("first.weight") is rule
    assert rule.settings["weight_decay"] == 0.01
    assert rule.settings["1.weight_decay"] == 0.0
    assert (rule.settings["2.beta1"], rule.settings["2.eps"]) == (0.5, 0.125)
    optimizer.param_groups[0]["lr"] = 1.0
    assert rule.lr_at(1) == 0.5


def test_multi_step_keeps_the_groups() -> None:
    model = Tied()
    theirs = torch.optim.SGD(groups(model, momentum=0.5), lr=0.1, momentum=0.9)
    rule = optim.multi_step(from_torch(theirs)).named(names(model))
    assert rule.predicts
    assert [dict(each.hyperparameters)["momentum"] for each in rule.rules] == [0.9, 0.5]
    assert all(each.predict is each.predict_steps for each in rule.rules)
    mixed = from_torch(torch.optim.SGD(groups(model, momentum=0.0), lr=0.1, momentum=0.9))
    assert not mixed.predicts
    with pytest.raises(HetpipeError, match=r"sgd .* has no multi-step prediction"):
        optim.multi_step(mixed)


def test_parameters_must_be_the_models() -> None:
    model, other = Tied(), nn.Linear(2, 5)
    rule = from_torch(torch.optim.SGD([*groups(model), {"params": other.parameters()}], lr=0.1))
    with pytest.raises(HetpipeError) as caught:
        rule.named(names(model))
    assert "group 2 of the optimizer has a parameter of shape [5, 2] that is nei" in str(
        caught.value
    )
    with pytest.raises(HetpipeError, match="no group for 'a' before a pipeline"):
        rule.rule_for("a")


def test_trained_parameters_must_be_in_a_group() -> None:
    model, loss = Tied(), nn.Linear(3, 3)
    rule = from_torch(torch.optim.SGD([model.first.weight], lr=0.1))
    with pytest.raises(HetpipeError) as caught:
        rule.named(names(model, loss))
    assert (
        "3 trained parameters are in no group of the optimizer: first.bias, loss.weight, loss."
        in (str(caught.value))
    )
    assert "requires_grad_(False)" in str(caught.value)
    model.first.bias.requires_grad_(False)
    assert rule.named(names(model)).rule_for("first.weight").name == "sgd"


class Own(torch.optim.Adam):
    """An optimizer of a user."""


WEIGHTS = [torch.zeros(2, requires_grad=True)]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (torch.optim.LBFGS(WEIGHTS), "hetpipe has no torch.optim.LBFGS; of torch's optimizers it "),
        (torch.optim.SparseAdam(WEIGHTS), "hetpipe has no torch.optim.SparseAdam; of torch's"),
        (torch.optim.RAdam(WEIGHTS), "hetpipe has no torch.optim.RAdam; of torch's optimizers it "),
        (
            Own(WEIGHTS),
            "hetpipe has no test_from_torch.Own; of torch's optimizers it has SGD, Adam,",
        ),
        (torch.optim.Adam(WEIGHTS, betas=(0.9, 0.0), eps=1e400), "eps must be finite"),
    ],
)
def test_other_optimizers_are_refused_by_name(theirs: torch.optim.Optimizer, message: str) -> None:
    with pytest.raises(HetpipeError) as caught:
        from_torch(theirs)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", CASES)
def test_an_optimizer_that_has_made_steps_is_refused(kind: str) -> None:
    weights = torch.ones(2, requires_grad=True)
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)([weights], lr=0.1, **settings)
    from_torch(optimizer)
    weights.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(HetpipeError, match=f"torch.optim.{kind} has already made steps, and"):
        from_torch(optimizer)


def test_hooks_are_refused() -> None:
    optimizer = torch.optim.SGD(WEIGHTS)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(HetpipeError, match=r"torch\.optim\.SGD has hooks for its steps"):
        from_torch(optimizer)
    handle.remove()
    from_torch(optimizer)


def test_a_scheduler_must_be_given() -> None:
    optimizer = torch.optim.SGD(WEIGHTS)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(HetpipeError) as caught:
        from_torch(optimizer)
    line = "write optimizer=hp.optim.from_torch(optimizer, scheduler)"
    assert f"torch.optim.SGD has a scheduler, which changes its learning rates: {line}" in str(
        caught.value
    )
    from_torch(optimizer, scheduler)


def test_a_rule_with_a_scheduler_trains_as_torch_does() -> None:
    start = torch.linspace(1, -3, 6, dtype=torch.float64)
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.AdamW([weights], lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30) * 0.99**step)
    rule = from_torch(optimizer, scheduler)
    expected = trained_by_torch(optimizer, weights, scheduler.step)
    torch.testing.assert_close(trained_by_rule(rule, start), expected, rtol=1e-10, atol=1e-12)
