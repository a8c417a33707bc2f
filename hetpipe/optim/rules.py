"""The optimizers: SGD with momentum, Adam and AdamW, as torch.optim defines them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import Optimizer

if TYPE_CHECKING:
    Result = tuple[torch.Tensor, tuple[torch.Tensor, ...]]


def sgd(
    lr: float, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Optimizer:
    """Stochastic gradient descent, `torch.optim.SGD` without dampening."""
    _check(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and momentum == 0:
        raise HetpipeError("nesterov needs a momentum greater than 0")

    def update(
        param: torch.Tensor,
        grad: torch.Tensor,
        state: tuple[torch.Tensor, ...],
        step: torch.Tensor,
        lr: torch.Tensor,
    ) -> Result:
        if weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        if not state:
            return param - lr * grad, ()
        velocity = torch.add(grad, state[0], alpha=momentum)
        direction = torch.add(grad, velocity, alpha=momentum) if nesterov else velocity
        return param - lr * direction, (velocity,)

    settings = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": float(nesterov)}
    return Optimizer("sgd", lr, ("momentum",) if momentum else (), update, tuple(settings.items()))


def adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Adam (Kingma and Ba, ICLR'15), `torch.optim.Adam`; decay is added to the gradient."""
    return _adam("adam", lr, betas, eps, weight_decay, decoupled=False)


def adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter, ICLR'19), `torch.optim.AdamW`; decay is apart."""
    return _adam("adamw", lr, betas, eps, weight_decay, decoupled=True)


def _adam(
    name: str,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> Optimizer:
    _check(lr=lr, eps=eps, weight_decay=weight_decay)
    if not all(0 <= beta < 1 for beta in betas):
        raise HetpipeError(f"betas must lie in [0, 1), not {betas}")
    beta1, beta2 = betas

    def update(
        param: torch.Tensor,
        grad: torch.Tensor,
        state: tuple[torch.Tensor, ...],
        step: torch.Tensor,
        lr: torch.Tensor,
    ) -> Result:
        if weight_decay and decoupled:
            param = param * (1 - lr * weight_decay)
        elif weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        mean = torch.lerp(state[0], grad, 1 - beta1)
        square = torch.addcmul(state[1] * beta2, grad, grad, value=1 - beta2)
        root = square.sqrt() / _correction(beta2, step).sqrt() + eps
        return param - lr / _correction(beta1, step) * (mean / root), (mean, square)

    settings = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    return Optimizer(name, lr, ("mean", "square"), update, tuple(settings.items()))


def _correction(beta: float, step: torch.Tensor) -> torch.Tensor:
    """1 - beta^step, without the cancellation that float32 would suffer."""
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise HetpipeError(f"{name} must not be negative, but is {value}")
