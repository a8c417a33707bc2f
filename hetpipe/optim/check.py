"""Accepts hetpipe's optimizers; refuses other objects with the line to write instead."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from numbers import Real
from typing import Any

from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import Optimizer, as_number

_OURS = ("adagrad", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd")
_SETTINGS = ("lr", "momentum", "betas", "alpha", "eps", "weight_decay", "nesterov")
_OFF = {"momentum": 0, "nesterov": False, "weight_decay": 0}  # the defaults of torch and hetpipe
_WITHOUT_EFFECT = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_LOST: dict[str, tuple[object, str]] = {
    "amsgrad": (False, ""),
    "centered": (False, ""),
    "dampening": (0, ""),
    "initial_accumulator_value": (0, ""),
    "maximize": (False, " (return the loss with the other sign from loss_fn)"),
}
"""torch's settings that hetpipe lacks: the value without effect, and a cure."""


def check_optimizer(value: object, parameters: Collection[object] = ()) -> Optimizer:
    """Return `value`, if it is one of hetpipe's optimizers.

    Raises `HetpipeError` for everything else, with the line to write. For an optimizer of
    `torch.optim` the line has the optimizer's settings; if hetpipe lacks some of these settings,
    the error names them instead. `parameters` are the model's trained parameters.
    """
    if isinstance(value, Optimizer):
        return value
    raise HetpipeError(f"optimizer is {_describe(value)}; {_cure(value, parameters)}")


def _describe(value: object) -> str:
    if value is None or isinstance(value, (str, Real)):
        return repr(value)
    if _of_torch(value):
        return (
            f"torch.optim.{_class(value).__name__}, which updates the tensors of one process only"
        )
    if _ours(value):
        return f"the function {_ours(value)} itself"
    return f"a {type(value).__name__}"


def _cure(value: object, parameters: Collection[object]) -> str:
    name = _ours(value) or (_class(value).__name__.lower() if _of_torch(value) else "")
    if name not in _OURS:
        return f"write hp.optim.adamw(lr=1e-3), or another of {', '.join(_OURS)}"
    groups: Any = getattr(value, "param_groups", None)
    if not groups:
        return f"write hp.optim.{name}(lr=1e-3)"
    if name == "adam" and groups[0].get("decoupled_weight_decay"):
        name = "adamw"
    if lost := list(_lost(value, groups, name, parameters)):
        return f"hp.optim.{name} trains differently, because it lacks {', '.join(lost)}"
    return f"write hp.optim.{name}({_settings(groups[0], name)})"


def _lost(
    value: object, groups: list[Mapping[str, Any]], name: str, parameters: Collection[object]
) -> Iterator[str]:
    """Yield the settings and state of a torch optimizer that hetpipe's optimizer `name` lacks."""
    known = {*_SETTINGS, *_WITHOUT_EFFECT, *_LOST, "initial_lr", "decoupled_weight_decay"}
    known |= {"lr_decay"} if name == "adagrad" else set()
    first = groups[0]
    if len(groups) > 1:
        keys = [key for key in first if key not in _WITHOUT_EFFECT]
        apart = [key for key in keys if any(g.get(key) != first[key] for g in groups)]
        if apart:
            yield (
                f"groups of parameters with different {' and '.join(apart)} "
                "(decay_exclude= selects the parameters without weight decay)"
            )
    for key, pair in first.items():
        off, cure = _LOST.get(key, (pair, ""))
        if pair != off and not (key == "dampening" and first["momentum"] == 0):
            yield f"{key}={pair!r}{cure}"
        elif key not in known:
            yield f"{key}={pair!r}"
    if "initial_lr" in first:
        yield "the schedule of its learning rate (give lr a function of the update's number)"
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    if left_out := sum(id(parameter) not in trained for parameter in parameters):
        yield f"a choice of parameters: it leaves {left_out} out (freeze them by requires_grad_)"
    # Adagrad has a state before its first step; in this state, "step" is 0.
    if any(bool(state.get("step", 1)) for state in getattr(value, "state", {}).values()):
        yield "the state of its earlier steps"


def _class(value: object) -> type:
    return value if isinstance(value, type) else type(value)


def _of_torch(value: object) -> bool:
    """Return whether a value is torch's optimizer or optimizer class, without importing torch."""
    return any(cls.__module__.startswith("torch.optim") for cls in _class(value).__mro__)


def _ours(value: object) -> str:
    """Return the name of a function of `hp.optim` that was passed without a call, or ""."""
    inside = str(getattr(value, "__module__", "")).startswith("hetpipe.optim")
    name = str(getattr(value, "__name__", ""))
    return name if inside and callable(value) and name in _OURS else ""


def _settings(group: Mapping[str, Any], name: str) -> str:
    """Return the settings of a torch optimizer's group as keywords of hetpipe's optimizer."""
    pairs = {key: group[key] for key in _SETTINGS if key in group}
    pairs["lr"] = as_number("lr", pairs["lr"])
    decays = name == "adamw"  # adamw decays by default, so the line must say weight_decay=0
    pairs = {k: v for k, v in pairs.items() if _OFF.get(k) != v or (decays and k == "weight_decay")}
    texts = {key: repr(pair) for key, pair in pairs.items()}
    if decay := group.get("lr_decay"):
        texts["lr"] = f"lambda step: {texts['lr']} / (1 + (step - 1) * {decay!r})"
    return ", ".join(f"{key}={text}" for key, text in texts.items())
