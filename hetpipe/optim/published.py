"""Lion and LAMB, as their papers define them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetpipe.optim.formulas import (
    TINY,
    check,
    check_betas,
    correction,
    moments,
    repeated,
    root,
    zero_before_start,
)
from hetpipe.optim.rule import Optimizer, exclude_from_decay

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe.optim.rule import LearningRate, NameFilter, Result, Tensors


def lion(
    lr: LearningRate = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    decay_exclude: NameFilter | None = None,
) -> Optimizer:
    """Lion (Chen et al., NeurIPS'23, algorithm 2): the sign of a momentum, with decoupled decay.

    Prediction: dW = sign(m), the direction of an update whose gradient is m itself; the decay is
    not predicted.
    """
    check(lr, weight_decay=weight_decay)
    check_betas(betas)
    beta1, beta2 = betas

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        direction = torch.lerp(state[0], grad, 1 - beta1).sign()
        if weight_decay:
            direction = torch.add(direction, param, alpha=weight_decay)
        return param - lr * direction, (torch.lerp(state[0], grad, 1 - beta2),)

    settings = {"beta1": beta1, "beta2": beta2, "weight_decay": weight_decay}
    predict = repeated(lambda state: state[0].sign())
    optimizer = Optimizer("lion", lr, ("mean",), update, tuple(settings.items()), predict)
    return exclude_from_decay(optimizer, decay_exclude, lambda: lion(lr, betas, 0.0))


def lamb(
    lr: LearningRate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    decay_exclude: NameFilter | None = None,
) -> Optimizer:
    """LAMB (You et al., ICLR'20, algorithm 2): Adam's direction, scaled to the weights' norm.

    The paper's layer is one parameter tensor here, and its phi the identity. If the weights or the
    direction are all zero, the ratio of their norms counts as 1.

    Prediction: dW is the update's direction from the present weights and moments. It includes the
    decay, because the decay is part of the direction's norm.
    """
    check(lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    beta1, beta2 = betas

    def moved(param: Tensor, state: Tensors, step: Tensor, eps: float, scale: Tensor) -> Tensor:
        direction = state[0] / root(state[1], beta2, step, eps) / correction(beta1, step)
        if weight_decay:
            direction = torch.add(direction, param, alpha=weight_decay)
        return param - scale * _ratio(_norm(param), _norm(direction)) * direction

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        state = moments(state, grad, betas)
        return moved(param, state, step, eps, lr), state

    def predict(param: Tensor, state: Tensors, step: Tensor, lr: Tensor, ahead: Tensor) -> Tensor:
        scale = lr * zero_before_start(step, ahead)
        return moved(param, state, step.clamp(min=1), max(eps, TINY), scale)

    settings = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    optimizer = Optimizer("lamb", lr, ("mean", "square"), update, tuple(settings.items()), predict)
    return exclude_from_decay(optimizer, decay_exclude, lambda: lamb(lr, betas, eps, 0.0))


def _norm(x: Tensor) -> Tensor:
    return (x * x).sum().sqrt()


def _ratio(weights: Tensor, direction: Tensor) -> Tensor:
    """Return the ratio of two norms, weights / direction; 1 if one of them is 0."""
    positive = torch.logical_and(weights > 0, direction > 0)
    return torch.where(positive, weights / direction, torch.ones_like(weights))
