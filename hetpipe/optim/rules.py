"""SGD with momentum, Adam and AdamW, as torch.optim defines them.

Predictions: PipeOptim's, param - lr * ahead * dW, with dW the direction of the last update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetpipe.errors import HetpipeError
from hetpipe.optim.formulas import (
    TINY,
    check,
    check_betas,
    correction,
    fading_sum,
    linear,
    moments,
    root,
    zero_before_start,
)
from hetpipe.optim.rule import Optimizer, exclude_from_decay

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe.optim.rule import LearningRate, NameFilter, Result, Tensors


def sgd(
    lr: LearningRate,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    decay_exclude: NameFilter | None = None,
) -> Optimizer:
    """Stochastic gradient descent, `torch.optim.SGD` without dampening.

    Prediction: dW is the velocity v. Nesterov's direction g + u v is v too, for the gradient
    g = (1 - u) v. Without momentum there is no state, and no prediction.
    """
    check(lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and momentum == 0:
        raise HetpipeError("nesterov needs a momentum greater than 0")

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        if not state:
            return param - lr * grad, ()
        velocity = torch.add(grad, state[0], alpha=momentum)
        direction = torch.add(grad, velocity, alpha=momentum) if nesterov else velocity
        return param - lr * direction, (velocity,)

    def predict(param: Tensor, state: Tensors, step: Tensor, lr: Tensor, ahead: Tensor) -> Tensor:
        return linear(param, lr, ahead, state[0])

    def predict_steps(
        param: Tensor, state: Tensors, step: Tensor, lr: Tensor, ahead: Tensor
    ) -> Tensor:
        ahead = zero_before_start(step, ahead)
        fading = fading_sum(momentum, ahead)
        scale = lr * momentum if nesterov else lr
        predicted = param - scale * fading * state[0]
        if not weight_decay:
            return predicted
        decays = scale * (ahead - fading) / (1 - momentum)
        if nesterov:
            decays = decays + lr * ahead
        return predicted - weight_decay * decays * param

    settings = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": float(nesterov)}
    optimizer = Optimizer(
        "sgd",
        lr,
        ("momentum",) if momentum else (),
        update,
        tuple(settings.items()),
        predict if momentum else None,
        predict_steps if 0 < momentum < 1 else None,
    )
    return exclude_from_decay(optimizer, decay_exclude, lambda: sgd(lr, momentum, 0.0, nesterov))


def adam(
    lr: LearningRate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_exclude: NameFilter | None = None,
) -> Optimizer:
    """Adam (Kingma and Ba, ICLR'15), `torch.optim.Adam`; decay is added to the gradient.

    Prediction: dW = m_hat / (sqrt(v_hat) + eps).
    """
    optimizer = _adam("adam", lr, betas, eps, weight_decay, decoupled=False)
    return exclude_from_decay(optimizer, decay_exclude, lambda: adam(lr, betas, eps, 0.0))


def adamw(
    lr: LearningRate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay_exclude: NameFilter | None = None,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter, ICLR'19), `torch.optim.AdamW`; decay is apart.

    Prediction: dW = m_hat / (sqrt(v_hat) + eps); the decay is not predicted.
    """
    optimizer = _adam("adamw", lr, betas, eps, weight_decay, decoupled=True)
    return exclude_from_decay(optimizer, decay_exclude, lambda: adamw(lr, betas, eps, 0.0))


def _adam(
    name: str,
    lr: LearningRate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
) -> Optimizer:
    check(lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    beta1, beta2 = betas

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay and decoupled:
            param = param * (1 - lr * weight_decay)
        elif weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        mean, square = moments(state, grad, betas)
        direction = mean / root(square, beta2, step, eps)
        return param - lr / correction(beta1, step) * direction, (mean, square)

    def predict(param: Tensor, state: Tensors, step: Tensor, lr: Tensor, ahead: Tensor) -> Tensor:
        step = step.clamp(min=1)  # before the first update the mean and the direction are 0
        direction = state[0] / root(state[1], beta2, step, max(eps, TINY))
        return param - lr * ahead / correction(beta1, step) * direction

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
        return param - lr * (total / root(state[1], beta2, step, max(eps, TINY)))

    settings = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    state, fixed = ("mean", "square"), tuple(settings.items())
    return Optimizer(name, lr, state, update, fixed, predict, predict_steps)
