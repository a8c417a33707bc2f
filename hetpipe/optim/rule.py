"""Optimizers as pure functions: `(param, grad, state, step, lr) -> (param', state')`.

A rule is written once, in torch operations; capture traces it into an update graph for any backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = tuple[Tensor, ...]
    Result = tuple[Tensor, Tensors]
    Update = Callable[[Tensor, Tensor, Tensors, Tensor, Tensor], Result]
    Predict = Callable[[Tensor, Tensors, Tensor, Tensor, Tensor], Tensor]
    LearningRate = float | Callable[[int], float]
    NameFilter = Callable[[str], bool]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer. `update` works on one parameter; `state` names its state tensors.

    Every state tensor has its parameter's shape and dtype and starts at zero. The arguments `step`,
    which counts updates from 1, and `lr` are 0-d tensors, float64 for a float64 parameter and else
    float32. The field `lr` may be a function of the update's number.

    `predict(param, state, step, lr, ahead)` returns the weights expected after `ahead` (0-d) more
    updates, from the state after `step` updates; `param` itself if `step` or `ahead` is 0. The
    field is None if the state has no direction to predict from. `predict_steps` predicts every
    single update: see `multi_step`.

    If `decay_exclude` returns True for a parameter's name, `undecayed` updates the parameter.
    """

    name: str
    lr: LearningRate
    state: tuple[str, ...]
    update: Update
    hyperparameters: tuple[tuple[str, float], ...] = ()
    predict: Predict | None = None
    predict_steps: Predict | None = None
    decay_exclude: NameFilter | None = None
    undecayed: Optimizer | None = None

    def __post_init__(self) -> None:
        if not callable(self.lr):
            object.__setattr__(self, "lr", as_number("lr", self.lr))

    def lr_at(self, step: int) -> float:
        """Return the learning rate of update number `step`; the first update has number 1. Raises
        `HetpipeError` for an invalid rate."""
        value: object = self.lr(step) if callable(self.lr) else self.lr
        rate = _only_element(value)
        rate = float(rate) if isinstance(rate, Real) else math.nan
        if not 0 <= rate < math.inf:
            raise HetpipeError(
                f"the learning rate of update {step} is {value}; it must be finite and at least 0"
            )
        return rate

    def rule_for(self, name: str) -> Optimizer:
        """Return the optimizer for the parameter `name`: this optimizer, or `undecayed`."""
        if self.undecayed is not None and self.decay_exclude is not None:
            return self.undecayed if self.decay_exclude(name) else self
        return self


def as_number(name: str, value: object) -> float:
    """Return a setting as a number; for a tensor or array, its only element. Raises `HetpipeError`
    for anything else."""
    number = _only_element(value)
    if isinstance(number, Real):
        return number  # type: ignore[return-value]
    is_text = isinstance(value, str) and _is_number_text(value)
    hint = f", as float({value!r}) returns (YAML reads 1e-3 as text, 1.0e-3 as a number)"
    hint = hint if is_text else ""
    raise HetpipeError(f"{name} is {value!r}, a {type(value).__name__}: give a number{hint}")


def _only_element(value: object) -> object:
    """Return the only element of a tensor or array; return everything else unchanged."""
    if getattr(value, "shape", None) in ((), (1,)) and hasattr(value, "item"):
        return value.item()
    return value


def _is_number_text(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def exclude_from_decay(
    optimizer: Optimizer, decay_exclude: NameFilter | None, undecayed: Callable[[], Optimizer]
) -> Optimizer:
    """Return `optimizer`, with `undecayed()` for the parameters that `decay_exclude` picks."""
    if decay_exclude is None:
        return optimizer
    changed = _with_setting(optimizer, "decay_exclude")
    return replace(changed, decay_exclude=decay_exclude, undecayed=undecayed())


def multi_step(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer that predicts every update ahead, instead of repeating the last update.

    Like FTPipe (Eliad et al., ATC'21), the prediction expects further gradients to be zero except
    for weight decay, so the momentum m fades. With s = ahead, b the momentum's factor, w the weight
    decay, p the weights and A = b + b^2 + ... + b^s = b (1 - b^s) / (1 - b):

    - sgd: p - lr V, V = A m + w p (s - A) / (1 - b); with nesterov p - lr (b V + s w p);
    - adam: p - lr (A m_hat + (s - A) w p) / (sqrt(v_hat) + eps);
    - adamw: p (1 - lr w)^s - lr A m_hat / (sqrt(v_hat) + eps).

    Squared gradients are expected to equal v_hat, so v_hat stays. Bias corrections, lr and the p in
    a sum stay at their present values; FTPipe instead computes their value for each update.

    Raises `HetpipeError` for other optimizers and for sgd without a momentum between 0 and 1.
    """
    if optimizer.predict_steps is None:
        raise HetpipeError(
            f"{optimizer.name} {dict(optimizer.hyperparameters)} has no multi-step prediction; use "
            "sgd with a momentum between 0 and 1, adam or adamw"
        )
    undecayed = None if optimizer.undecayed is None else multi_step(optimizer.undecayed)
    changed = _with_setting(optimizer, "multi_step")
    return replace(changed, predict=optimizer.predict_steps, undecayed=undecayed)


def _with_setting(optimizer: Optimizer, name: str) -> Optimizer:
    """Return the optimizer with one more hyperparameter, which distinguishes it in caches."""
    settings = {**dict(optimizer.hyperparameters), name: 1.0}
    return replace(optimizer, hyperparameters=tuple(settings.items()))
