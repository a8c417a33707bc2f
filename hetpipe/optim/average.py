"""Adds an exponential moving average of the weights to an optimizer, as one more state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hetpipe.optim.rule import AVERAGE, Optimizer

if TYPE_CHECKING:
    from torch import Tensor

    from hetpipe.optim.rule import Predict, Result, Tensors


def with_average(optimizer: Optimizer, decay: float) -> Optimizer:
    """Return the optimizer, which also keeps the average of each parameter after every update.

    The average is decay * average + (1 - decay) * parameter, as in `get_ema_multi_avg_fn` of
    `torch.optim.swa_utils`; after the first update it is the parameter itself.
    """
    inner = optimizer

    def update(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
        *others, average = state
        new, new_others = inner.update(param, grad, tuple(others), step, lr)
        moved = torch.lerp(average, new, 1 - decay)
        return new, (*new_others, torch.where(step > 1, moved, new))

    groups = (group._replace(rule=with_average(group.rule, decay)) for group in optimizer.groups)
    return replace(
        optimizer,
        state=(*optimizer.state, AVERAGE),
        update=update,
        predict=_without_average(optimizer.predict),
        predict_steps=_without_average(optimizer.predict_steps),
        groups=tuple(groups),
    )


def _without_average(predict: Predict | None) -> Predict | None:
    """Return a prediction that takes the average as its last state and does not read it."""
    if predict is None:
        return None
    inner = predict

    def predict_weights(
        param: Tensor, state: Tensors, step: Tensor, lr: Tensor, ahead: Tensor
    ) -> Tensor:
        return inner(param, state[:-1], step, lr, ahead)

    return predict_weights
