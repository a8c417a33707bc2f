"""SGD, RMSprop, Adagrad and Adadelta, as torch.optim defines them.

Predictions follow PipeOptim: param - lr * ahead * dW, where dW is the direction of the last update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hetpipe.errors import HetpipeError
from hetpipe.optim.formulas import (
    ascending,
    check,
    check_below_one,
    fading_sum,
    repeated,
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
    dampening: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Stochastic gradient descent, `torch.optim.SGD`. The first update is not dampened.

    Prediction: dW is the velocity v. With momentum u and equal gradients g, v is g / (1 - u), so
    Nesterov's direction g + u v equals v too. Without momentum there is no state and no prediction.
    """
    check(lr, momentum=momentum, weight_decay=weight_decay, dampening=dampening)
    if nesterov and (momentum == 0 or dampening):
        raise HetpipeError(
            f"nesterov needs a momentum greater than 0 and no dampening, but momentum is {momentum}"
            f" and dampening {dampening}"
        )

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        if not state:
            return param - lr * grad, ()
        if dampening:
            grad = grad * (1 - dampening * (step - 1).clamp(max=1))
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
        decays = scale * (ahead - fading) * ((1 - dampening) / (1 - momentum))
        if nesterov:
            decays = decays + lr * ahead
        return predicted - weight_decay * decays * param

    settings = {
        "momentum": momentum,
        "weight_decay": weight_decay,
        "nesterov": float(nesterov),
        "dampening": dampening,
        "maximize": float(maximize),
    }
    optimizer = Optimizer(
        "sgd",
        lr,
        ("momentum",) if momentum else (),
        ascending(update, maximize),
        tuple(settings.items()),
        repeated(lambda state: state[0]) if momentum else None,
        predict_steps if 0 < momentum < 1 else None,
    )
    return exclude_from_decay(
        optimizer,
        decay_exclude,
        lambda: sgd(lr, momentum, 0.0, nesterov, None, dampening, maximize),
    )


def rmsprop(
    lr: LearningRate = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    decay_exclude: NameFilter | None = None,
    centered: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """RMSprop (Hinton's lecture 6e, 2012), `torch.optim.RMSprop`.

    Prediction: dW is the momentum of g / (sqrt(v) + eps). Without momentum the state holds sizes
    but no direction, so nothing is predicted.
    """
    check(lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
    check_below_one("alpha", alpha)

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        square = torch.addcmul(state[0] * alpha, grad, grad, value=1 - alpha)
        new: Tensors = (square,)
        size = square
        if centered:
            mean = torch.lerp(state[1], grad, 1 - alpha)
            new = (square, mean)
            size = torch.addcmul(square, mean, mean, value=-1)
        direction = grad / (size.sqrt() + eps)
        if not momentum:
            return param - lr * direction, new
        velocity = torch.add(direction, state[-1], alpha=momentum)
        return param - lr * velocity, (*new, velocity)

    settings = {
        "alpha": alpha,
        "eps": eps,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "centered": float(centered),
        "maximize": float(maximize),
    }
    states = {"square": True, "mean": centered, "momentum": momentum}
    optimizer = Optimizer(
        "rmsprop",
        lr,
        tuple(name for name, used in states.items() if used),
        ascending(update, maximize),
        tuple(settings.items()),
        repeated(lambda state: state[-1]) if momentum else None,
    )
    return exclude_from_decay(
        optimizer,
        decay_exclude,
        lambda: rmsprop(lr, alpha, eps, 0.0, momentum, None, centered, maximize),
    )


def adagrad(
    lr: LearningRate = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    decay_exclude: NameFilter | None = None,
    lr_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Adagrad (Duchi, Hazan and Singer, JMLR'11), `torch.optim.Adagrad`.

    The state `sum` starts at 0, so it lacks `initial_accumulator_value`. The state holds sizes but
    no direction, so nothing is predicted.
    """
    check(lr, eps=eps, weight_decay=weight_decay, lr_decay=lr_decay)
    check(lr, initial_accumulator_value=initial_accumulator_value)

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        if lr_decay:
            lr = lr / (1 + (step - 1) * lr_decay)
        total = torch.addcmul(state[0], grad, grad)
        size = total + initial_accumulator_value if initial_accumulator_value else total
        return param - lr * (grad / (size.sqrt() + eps)), (total,)

    settings = {
        "eps": eps,
        "weight_decay": weight_decay,
        "lr_decay": lr_decay,
        "initial_accumulator_value": initial_accumulator_value,
        "maximize": float(maximize),
    }
    optimizer = Optimizer(
        "adagrad", lr, ("sum",), ascending(update, maximize), tuple(settings.items())
    )
    return exclude_from_decay(
        optimizer,
        decay_exclude,
        lambda: adagrad(lr, eps, 0.0, None, lr_decay, initial_accumulator_value, maximize),
    )


def adadelta(
    lr: LearningRate = 1.0,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    decay_exclude: NameFilter | None = None,
    maximize: bool = False,
) -> Optimizer:
    """Adadelta (Zeiler, 2012), `torch.optim.Adadelta`.

    The state holds sizes but no direction, so nothing is predicted.
    """
    check(lr, eps=eps, weight_decay=weight_decay)
    check_below_one("rho", rho)

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        if weight_decay:
            grad = torch.add(grad, param, alpha=weight_decay)
        square = torch.addcmul(state[0] * rho, grad, grad, value=1 - rho)
        direction = (state[1] + eps).sqrt() / (square + eps).sqrt() * grad
        moved = torch.addcmul(state[1] * rho, direction, direction, value=1 - rho)
        return param - lr * direction, (square, moved)

    settings = {
        "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": float(maximize),
    }  # fmt: skip
    states = ("square", "moved")
    optimizer = Optimizer(
        "adadelta", lr, states, ascending(update, maximize), tuple(settings.items())
    )
    return exclude_from_decay(
        optimizer, decay_exclude, lambda: adadelta(lr, rho, eps, 0.0, None, maximize)
    )
