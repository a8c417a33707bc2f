"""Reads an optimizer of torch.optim, and its scheduler, into an optimizer of hetpipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hetpipe.errors import HetpipeError
from hetpipe.optim.adams import adam, adamax, adamw, nadam
from hetpipe.optim.rule import Group, Optimizer, as_number
from hetpipe.optim.rules import adadelta, adagrad, rmsprop, sgd
from hetpipe.optim.torch_scheduler import rates_of

if TYPE_CHECKING:
    from hetpipe.optim.rule import LearningRate

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
}
"""torch's optimizers by the name of the same optimizer in hetpipe."""
_MAKERS: dict[type, Callable[..., Optimizer]] = {
    CLASSES[make.__name__]: make
    for make in (sgd, adam, adamw, nadam, adamax, rmsprop, adagrad, adadelta)
}
_WITHOUT_EFFECT = {"lr", "foreach", "fused", "capturable", "differentiable"}


def from_torch(
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> Optimizer:
    """Return an optimizer with the groups, settings and learning rates of an optimizer of torch.

    `scheduler` was made for `optimizer`; it counts updates, as if `scheduler.step()` followed each
    `optimizer.step()`. hetpipe reads both objects now and does not change them; if they change
    later, this has no effect. The optimizer fits only a model that has all its parameters.

    Raises `HetpipeError` for an optimizer or a scheduler that hetpipe lacks or that has already
    made a step, and for a scheduler that needs more than the number of updates.
    """
    make, name = _MAKERS.get(type(optimizer)), _name(optimizer)
    if make is None:
        names = ", ".join(cls.__name__ for cls in _MAKERS)
        raise HetpipeError(f"hetpipe has no {name}; of torch's optimizers it has {names}")
    _check_fresh(optimizer, name)
    groups = optimizer.param_groups
    rates: Sequence[LearningRate] = [group["lr"] for group in groups]
    if scheduler is not None:
        rates = rates_of(scheduler, optimizer)
    elif _has_scheduler(optimizer):
        raise HetpipeError(
            f"{name} has a scheduler, which changes its learning rates: write "
            "optimizer=hp.optim.from_torch(optimizer, scheduler)"
        )
    first, *others = (_rule(make, *each, name) for each in zip(groups, rates, strict=True))
    return replace(
        first,
        groups=tuple(Group(_unnamed, rule) for rule in others),
        tensors=tuple(tuple(group["params"]) for group in groups),
    )


def _rule(
    make: Callable[..., Optimizer], group: Mapping[str, Any], rate: LearningRate, name: str
) -> Optimizer:
    """Return the rule of one group."""
    settings = {key: group[key] for key in group if key not in ("params", "param_names")}
    if make in (adam, adamw):
        make = adamw if settings.pop("decoupled_weight_decay", False) else adam
    known = inspect.signature(make).parameters
    used = {key: _plain(key, value) for key, value in settings.items() if key in known}
    return make(**{**used, "lr": rate})


def _plain(name: str, value: Any) -> Any:
    """Return a setting with numbers instead of tensors."""
    if isinstance(value, (tuple, list)):
        return tuple(as_number(name, each) for each in value)
    return value if isinstance(value, bool) else as_number(name, value)


def _check_fresh(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise `HetpipeError` for an optimizer with a state or with hooks, or with settings that
    hetpipe does not know."""
    # Adagrad has a state before its first step; in this state, "step" is 0.
    if any(bool(state.get("step", 1)) for state in optimizer.state.values()):
        raise HetpipeError(
            f"{name} has already made steps, and hetpipe does not read their state: make a new "
            "optimizer, or continue from a checkpoint by hp.Pipeline.load"
        )
    hooks: Any = vars(optimizer)
    if hooks["_optimizer_step_pre_hooks"] or hooks["_optimizer_step_post_hooks"]:
        raise HetpipeError(
            f"{name} has hooks for its steps, and a pipeline cannot run them: remove the hooks"
        )
    known = inspect.signature(_MAKERS[type(optimizer)]).parameters
    free = {*known, *_WITHOUT_EFFECT, "decoupled_weight_decay"}
    if unknown := [key for key in optimizer.defaults if key not in free]:
        raise HetpipeError(f"{name} has settings that hetpipe does not know: {', '.join(unknown)}")


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    wrapped = hasattr(optimizer.step, "_wrapped_by_lr_sched")
    return wrapped or any("initial_lr" in group for group in optimizer.param_groups)


def _name(optimizer: object) -> str:
    kind = type(optimizer)
    inside = kind.__module__.startswith("torch.optim")
    return f"torch.optim.{kind.__name__}" if inside else f"{kind.__module__}.{kind.__name__}"


def _unnamed(name: str) -> bool:
    raise HetpipeError(
        f"an optimizer of torch has no group for {name!r} before a pipeline knows its parameters' "
        "names: give it to hp.Pipeline"
    )
