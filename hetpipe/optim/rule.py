"""Optimizers as pure functions: `(param, grad, state, step, lr) -> (param', state')`.

A rule is written once, in torch operations; capture traces it into an update graph for any backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple

from hetpipe.errors import HetpipeError

if TYPE_CHECKING:
    from torch import Tensor

    Tensors = tuple[Tensor, ...]
    Result = tuple[Tensor, Tensors]
    Update = Callable[[Tensor, Tensor, Tensors, Tensor, Tensor], Result]
    Predict = Callable[[Tensor, Tensors, Tensor, Tensor, Tensor], Tensor]
    LearningRate = float | Callable[[int], float]
    NameFilter = Callable[[str], bool]


AVERAGE = "average"
"""The name of the state with the moving average of the weights, see `hetpipe.optim.average`."""


class Group(NamedTuple):
    """Parameters with their own rule: the parameters whose names `picks` accepts."""

    picks: NameFilter
    rule: Optimizer


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

    A parameter belongs to the first of `groups` that picks it; the others, group 0, follow this
    optimizer itself. `tensors` has the parameters of all groups of an optimizer of torch, from
    group 0 on, until `named` finds their names.
    """

    name: str
    lr: LearningRate
    state: tuple[str, ...]
    update: Update
    hyperparameters: tuple[tuple[str, float], ...] = ()
    predict: Predict | None = None
    predict_steps: Predict | None = None
    groups: tuple[Group, ...] = ()
    tensors: tuple[Tensors, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if not callable(self.lr):
            object.__setattr__(self, "lr", as_number("lr", self.lr))

    @property
    def rules(self) -> tuple[Optimizer, ...]:
        """The rules of all groups."""
        return (self, *(group.rule for group in self.groups))

    @property
    def scalars(self) -> dict[LearningRate, str]:
        """The names of the scalars that hold the learning rates: `lr`, `lr.1` and so on. Groups
        with the same learning rate share a scalar."""
        rates = dict.fromkeys(rule.lr for rule in self.rules)
        return {rate: f"lr.{n}" if n else "lr" for n, rate in enumerate(rates)}

    @property
    def settings(self) -> dict[str, object]:
        """The settings of all groups; the names of group 1's settings begin with `1.`."""
        settings: dict[str, object] = dict(self.hyperparameters)
        for number, (_, rule) in enumerate(self.groups, 1):
            own = {"name": rule.name, **dict(rule.hyperparameters)}
            settings |= {f"{number}.{name}": value for name, value in own.items()}
        return settings

    @property
    def predicts(self) -> bool:
        """Whether every group has a prediction."""
        return all(rule.predict is not None for rule in self.rules)

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

    def rates_at(self, step: int) -> dict[str, float]:
        """Return the learning rates of update number `step`, see `scalars`. Raises
        `HetpipeError`."""
        rules = {rule.lr: rule for rule in self.rules}
        return {scalar: rules[rate].lr_at(step) for rate, scalar in self.scalars.items()}

    def group_of(self, name: str) -> int:
        """Return the number of the group of the parameter `name`."""
        numbers = (n for n, group in enumerate(self.groups, 1) if group.picks(name))
        return next(numbers, 0)

    def with_lr(self, lr: LearningRate) -> Optimizer:
        """Return the optimizer with another learning rate; groups with the same rate get it too."""
        groups = tuple(
            group._replace(rule=group.rule.with_lr(lr)) if group.rule.lr == self.lr else group
            for group in self.groups
        )
        return replace(self, lr=lr, groups=groups)

    def rule_for(self, name: str) -> Optimizer:
        """Return the rule of the parameter `name`."""
        return self.rules[self.group_of(name)]

    def members(self, names: Iterable[str]) -> list[list[str]]:
        """Return the parameters among `names` of each group after group 0."""
        members: list[list[str]] = [[] for _ in self.rules]
        for name in names:
            members[self.group_of(name)].append(name)
        return members[1:]

    def renamed(self, old: Callable[[str], str]) -> Optimizer:
        """Return the optimizer for parameters with new names; `old` returns the old name."""

        def pick(picks: NameFilter) -> NameFilter:
            return lambda name: picks(old(name))

        return replace(self, groups=tuple(Group(pick(p), rule) for p, rule in self.groups))

    def named(self, parameters: Mapping[str, Tensor]) -> Optimizer:
        """Return the optimizer for a model with these trained and frozen parameters.

        Raises `HetpipeError` if the optimizer's `tensors` are not the model's, or are not all
        parameters that need gradients.
        """
        if not self.tensors:
            return self
        names = {id(parameter): name for name, parameter in parameters.items()}
        members = [
            frozenset(names.get(id(tensor), "") for tensor in tensors) for tensors in self.tensors
        ]
        for number, (tensors, group) in enumerate(zip(self.tensors, members, strict=True)):
            if "" in group:
                strange = next(tensor for tensor in tensors if id(tensor) not in names)
                raise HetpipeError(
                    f"group {number} of the optimizer has a parameter of shape "
                    f"{list(strange.shape)} that is neither the model's nor the loss's: make the "
                    "optimizer with model.parameters() of the model that you train"
                )
        known = frozenset[str]().union(*members)
        left = [n for n, p in parameters.items() if p.requires_grad and n not in known]
        if left:
            raise HetpipeError(
                f"{len(left)} trained parameters are in no group of the optimizer: "
                f"{', '.join(left[:3])}{', ...' if left[3:] else ''}; add them to a group, or "
                "freeze them by requires_grad_(False) before you make the pipeline"
            )
        groups = zip(self.groups, members[1:], strict=True)
        picked = (group._replace(picks=names.__contains__) for group, names in groups)
        return replace(self, groups=tuple(picked), tensors=())


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
    return replace(optimizer, groups=(Group(decay_exclude, undecayed()),))


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
    settings = {**dict(optimizer.hyperparameters), "multi_step": 1.0}
    groups = (group._replace(rule=multi_step(group.rule)) for group in optimizer.groups)
    return replace(
        optimizer,
        hyperparameters=tuple(settings.items()),
        predict=optimizer.predict_steps,
        groups=tuple(groups),
    )


def _keep(param: Tensor, grad: Tensor, state: Tensors, step: Tensor, lr: Tensor) -> Result:
    return param, state


NO_OPTIMIZER = Optimizer("none", 0.0, (), _keep)
"""Stands for an optimizer where nothing is trained."""
