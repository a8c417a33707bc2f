"""Optimizers as torch.optim defines them, and Lion and LAMB as their papers define them.

Predictions follow PipeOptim: param - lr * ahead * dW, where dW is the direction of the last update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetpipe.errors import HetpipeError
from hetpipe.optim.formulas import (
    TINY,
    check,
    check_below_one,
    check_betas,
    correction,
    fading_sum,
    moments,
    repeated,
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

    Prediction: dW is the velocity v. With momentum u and equal gradients g, v is g / (1 - u), so
    Nesterov's direction g + u v equals v too. Without momentum there is no state and no prediction.
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
        repeated(lambda state: state[0]) if momentum else None,
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
    """AdamW (Loshchilov and Hutter, ICLR'19), `torch.optim.AdamW`; decay is not in the gradient.

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


def rmsprop(
    lr: LearningRate = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    decay_exclude: NameFilter | None = None,
) -> Optimizer:
    """RMSprop (Hinton's lecture 6e, 2012), `torch.optim.RMSprop` without `centered`.

    Prediction: dW is the momentum of g / (sqrt(v) + eps). Without momentum the state holds sizes
    but no signs, so nothing is predicted.
    """
    check(lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
    check_below_one("alpha", alpha)

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        square = torch.addcmul(state[0] * alpha, grad, grad, value=1 - alpha)
        direction = grad / (square.sqrt() + eps)
        if not momentum:
            return param - lr * direction, (square,)
        velocity = torch.add(direction, state[1], alpha=momentum)
        return param - lr * velocity, (square, velocity)

    settings = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
    optimizer = Optimizer(
        "rmsprop",
        lr,
        ("square", "momentum") if momentum else ("square",),
        update,
        tuple(settings.items()),
        repeated(lambda state: state[1]) if momentum else None,
    )
    return exclude_from_decay(
        optimizer, decay_exclude, lambda: rmsprop(lr, alpha, eps, 0.0, momentum)
    )


def adagrad(
    lr: LearningRate = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    decay_exclude: NameFilter | None = None,
) -> Optimizer:
    """Adagrad (Duchi, Hazan and Singer, JMLR'11), `torch.optim.Adagrad` whose sum starts at 0.

    A function as `lr` replaces torch's `lr_decay`. The state holds sizes but no signs, so nothing
    is predicted.
    """
    check(lr, eps=eps, weight_decay=weight_decay)

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        total = torch.addcmul(state[0], grad, grad)
        return param - lr * (grad / (total.sqrt() + eps)), (total,)

    settings = {"eps": eps, "weight_decay": weight_decay}
    optimizer = Optimizer("adagrad", lr, ("sum",), update, tuple(settings.items()))
    return exclude_from_decay(optimizer, decay_exclude, lambda: adagrad(lr, eps, 0.0))


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
