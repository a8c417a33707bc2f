"""Adam and its relatives AdamW, NAdam and Adamax, as torch.optim defines them.

Predictions follow PipeOptim: param - lr * ahead * dW, where dW is the direction of the last update.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hetpipe.optim.formulas import (
    TINY,
    ascending,
    check,
    check_betas,
    correction,
    fading_sum,
    moments,
    root,
    zero_before_start,
)
from hetpipe.optim.rule import Optimizer, exclude_from_decay

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe.optim.rule import LearningRate, NameFilter, Predict, Result, Tensors


def adam(
    lr: LearningRate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_exclude: NameFilter | None = None,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam (Kingma and Ba, ICLR'15), `torch.optim.Adam`; decay is added to the gradient.

    Prediction: dW = m_hat / (sqrt(v_hat) + eps). With `amsgrad` v is the largest v so far.
    """
    optimizer = _adam("adam", lr, betas, eps, weight_decay, amsgrad, maximize)
    return exclude_from_decay(
        optimizer, decay_exclude, lambda: adam(lr, betas, eps, 0.0, None, amsgrad, maximize)
    )


def adamw(
    lr: LearningRate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay_exclude: NameFilter | None = None,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter, ICLR'19), `torch.optim.AdamW`; decay is not in the gradient.

    Prediction: dW = m_hat / (sqrt(v_hat) + eps); the decay is not predicted. With `amsgrad` v is
    the largest v so far.
    """
    optimizer = _adam("adamw", lr, betas, eps, weight_decay, amsgrad, maximize)
    return exclude_from_decay(
        optimizer, decay_exclude, lambda: adamw(lr, betas, eps, 0.0, None, amsgrad, maximize)
    )


def _adam(
    name: str,
    lr: LearningRate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    maximize: bool,
) -> Optimizer:
    check(lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    (beta1, beta2), decoupled = betas, name == "adamw"

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay and decoupled:
            param = param * (1 - lr * weight_decay)
        elif weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        new: Tensors = moments(state, grad, betas)
        if amsgrad:
            new = (*new, torch.maximum(state[2], new[1]))
        direction = new[0] / root(new[-1], beta2, step, eps)
        return param - lr / correction(beta1, step) * direction, new

    def predict_steps(
        param: Tensor, state: Tensors, step: Tensor, lr: Tensor, ahead: Tensor
    ) -> Tensor:
        ahead, step = zero_before_start(step, ahead), step.clamp(min=1)
        fading = fading_sum(beta1, ahead)
        total = fading / correction(beta1, step) * state[0]
        if weight_decay and decoupled:
            param = param * (1 - lr * weight_decay) ** ahead
        elif weight_decay:
            total = total + weight_decay * (ahead - fading) * param
        return param - lr * (total / root(state[-1], beta2, step, max(eps, TINY)))

    settings = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": float(amsgrad),
        "maximize": float(maximize),
    }
    return Optimizer(
        name,
        lr,
        ("mean", "square", "largest") if amsgrad else ("mean", "square"),
        ascending(update, maximize),
        tuple(settings.items()),
        _repeated(beta1, beta2, eps, -1),
        predict_steps,
    )


def _repeated(beta1: float, beta2: float, eps: float, square: int) -> Predict:
    """Return the prediction of Adam, whose squares are number `square` of its states."""

    def predict(param: Tensor, state: Tensors, step: Tensor, lr: Tensor, ahead: Tensor) -> Tensor:
        step = step.clamp(min=1)  # before the first update the mean and the direction are 0
        direction = state[0] / root(state[square], beta2, step, max(eps, TINY))
        return param - lr * ahead / correction(beta1, step) * direction

    return predict


def nadam(
    lr: LearningRate = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_exclude: NameFilter | None = None,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """NAdam (Dozat, ICLR'16 workshop), `torch.optim.NAdam`: Adam with Nesterov's momentum.

    The state `faded` is 1 - mu_1 mu_2 ... mu_t. It depends only on the number of updates, but it
    has no closed form. Prediction: dW = m_hat / (sqrt(v_hat) + eps), as Adam's.
    """
    check(lr, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
    check_betas(betas)
    beta1, beta2 = betas

    def momentum(step: Tensor) -> Tensor:
        return beta1 * (1 - 0.5 * torch.exp(step * (momentum_decay * math.log(0.96))))

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay and decoupled_weight_decay:
            param = param * (1 - lr * weight_decay)
        elif weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        mean, square = moments(state, grad, betas)
        now, later = momentum(step), momentum(step + 1)
        faded = state[2] * now + (1 - now)
        of_grad, of_mean = (1 - now) / faded, later / (faded * later + (1 - later))
        direction = (of_grad * grad + of_mean * mean) / root(square, beta2, step, eps)
        return param - lr * direction, (mean, square, faded)

    settings = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "momentum_decay": momentum_decay,
        "decoupled_weight_decay": float(decoupled_weight_decay),
        "maximize": float(maximize),
    }
    optimizer = Optimizer(
        "nadam",
        lr,
        ("mean", "square", "faded"),
        ascending(update, maximize),
        tuple(settings.items()),
        _repeated(beta1, beta2, eps, 1),
    )
    return exclude_from_decay(
        optimizer,
        decay_exclude,
        lambda: nadam(lr, betas, eps, 0.0, None, momentum_decay, decoupled_weight_decay, maximize),
    )


def adamax(
    lr: LearningRate = 2e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_exclude: NameFilter | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Adamax (Kingma and Ba, ICLR'15), `torch.optim.Adamax`: Adam, scaled by the largest gradient.

    Prediction: dW = m_hat / u, where u is the fading largest gradient.
    """
    check(lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    beta1, beta2 = betas

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        mean = torch.lerp(state[0], grad, 1 - beta1)
        largest = torch.maximum(state[1] * beta2, grad.abs() + eps)
        return param - lr / correction(beta1, step) * (mean / largest), (mean, largest)

    def predict(param: Tensor, state: Tensors, step: Tensor, lr: Tensor, ahead: Tensor) -> Tensor:
        direction = state[0] / (state[1] + TINY)
        return param - lr * ahead / correction(beta1, step.clamp(min=1)) * direction

    settings = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "maximize": float(maximize),
    }
    optimizer = Optimizer(
        "adamax",
        lr,
        ("mean", "largest"),
        ascending(update, maximize),
        tuple(settings.items()),
        predict,
    )
    return exclude_from_decay(
        optimizer, decay_exclude, lambda: adamax(lr, betas, eps, 0.0, None, maximize)
    )
