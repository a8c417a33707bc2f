"""RMSprop and Adagrad, as torch.optim defines them: gradients over the root of their squares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetpipe.optim.formulas import check, check_below_one, linear
from hetpipe.optim.rule import Optimizer, exclude_from_decay

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe.optim.rule import LearningRate, NameFilter, Result, Tensors


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

    def predict(param: Tensor, state: Tensors, step: Tensor, lr: Tensor, ahead: Tensor) -> Tensor:
        return linear(param, lr, ahead, state[1])

    settings = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
    optimizer = Optimizer(
        "rmsprop",
        lr,
        ("square", "momentum") if momentum else ("square",),
        update,
        tuple(settings.items()),
        predict if momentum else None,
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

    For its `lr_decay` give a function as `lr`. The state holds sizes but no signs, so nothing is
    predicted.
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
