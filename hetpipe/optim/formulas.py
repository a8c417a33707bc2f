"""Shared parts of rules: checks of settings, moving averages, and sums over updates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import as_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hetpipe.optim.rule import LearningRate, Predict, Result, Tensors, Update

TINY = 1e-30
"""Least eps in predictions, to prevent 0 / 0; far below the root of any positive float32."""


def check(lr: LearningRate, **settings: float) -> None:
    """Raise `HetpipeError` for a setting that is negative, not finite or no number; `lr` may be a
    function."""
    if not callable(lr):
        settings = {"lr": lr, **settings}
    for name, value in settings.items():
        if not 0 <= as_number(name, value) < math.inf:
            raise HetpipeError(f"{name} must be finite and not negative, but is {value}")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise `HetpipeError` unless `betas` are two factors of moving averages."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise HetpipeError(f"betas is {betas!r}: give two numbers, such as (0.9, 0.999)")
    check_below_one("betas", *betas)


def check_below_one(name: str, *values: float) -> None:
    """Raise `HetpipeError` for a factor of a moving average outside [0, 1)."""
    if not all(0 <= as_number(name, value) < 1 for value in values):
        raise HetpipeError(f"{name} must lie in [0, 1), not {', '.join(map(str, values))}")


def ascending(update: Update, maximize: bool) -> Update:
    """Return the update that climbs instead of descends, if `maximize` is True."""
    if not maximize:
        return update

    def ascend(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        return update(param, -grad, state, step, lr)

    return ascend


def correction(beta: float, step: Tensor) -> Tensor:
    """Return 1 - beta^step, without cancellation in float32."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def fading_sum(beta: float, steps: Tensor) -> Tensor:
    """Return beta + beta^2 + ... + beta^steps, for a beta in [0, 1)."""
    return correction(beta, steps) * (beta / (1 - beta))


def moments(state: Tensors, grad: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return Adam's moving averages of the gradient and its square, after one more gradient."""
    mean = torch.lerp(state[0], grad, 1 - betas[0])
    return mean, torch.addcmul(state[1] * betas[1], grad, grad, value=1 - betas[1])


def root(square: Tensor, beta: float, step: Tensor, eps: float) -> Tensor:
    """Return sqrt(v_hat) + eps: Adam's denominator."""
    return square.sqrt() / correction(beta, step).sqrt() + eps


def repeated(direction: Callable[[Tensors], Tensor]) -> Predict:
    """Return a prediction that repeats the last direction for each update ahead (PipeOptim)."""

    def predict(param: Tensor, state: Tensors, step: Tensor, lr: Tensor, ahead: Tensor) -> Tensor:
        return param - lr * ahead * direction(state)

    return predict


def zero_before_start(step: Tensor, ahead: Tensor) -> Tensor:
    """Return `ahead`, but 0 before the first update, when the state has no direction yet."""
    return ahead * step.clamp(max=1)
