"""Accepts an optimizer of hetpipe's, and refuses others with the line to write instead."""

from __future__ import annotations

from numbers import Real

from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import Optimizer

_OURS = ("adagrad", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd")
_SETTINGS = ("lr", "momentum", "betas", "alpha", "eps", "weight_decay", "nesterov")
_OFF = {"momentum": 0, "nesterov": False, "weight_decay": 0}  # by default, in ours too


def check_optimizer(value: object) -> Optimizer:
    """`value`, if it is an optimizer of hetpipe's.

    Raises `HetpipeError` for everything else, with the line to write: an optimizer of
    `torch.optim` becomes ours with its settings.
    """
    if isinstance(value, Optimizer):
        return value
    raise HetpipeError(f"optimizer is {_described(value)}; write {_cure(value)}")


def _described(value: object) -> str:
    if value is None or isinstance(value, (str, Real)):
        return repr(value)
    if _of_torch(value):
        return f"torch.optim.{_class(value).__name__}, which steps tensors of one process"
    if _ours(value):
        return f"the function {_ours(value)} itself"
    return f"a {type(value).__name__}"


def _cure(value: object) -> str:
    name = _ours(value) or (_class(value).__name__.lower() if _of_torch(value) else "")
    if name not in _OURS:
        return f"hp.optim.adamw(lr=1e-3), or another of {', '.join(_OURS)}"
    return f"hp.optim.{name}({_settings(value)})"


def _class(value: object) -> type:
    return value if isinstance(value, type) else type(value)


def _of_torch(value: object) -> bool:
    """Whether it is an optimizer of torch's, or such a class; without importing torch."""
    return any(cls.__module__.startswith("torch.optim") for cls in _class(value).__mro__)


def _ours(value: object) -> str:
    """The name of a function of `hp.optim` that the user passed without calling it."""
    inside = str(getattr(value, "__module__", "")).startswith("hetpipe.optim")
    name = str(getattr(value, "__name__", ""))
    return name if inside and callable(value) and name in _OURS else ""


def _settings(value: object) -> str:
    """The settings of a torch optimizer as keywords of ours; the learning rate at least."""
    defaults = getattr(value, "defaults", {})
    if not isinstance(defaults, dict) or "lr" not in defaults:
        return "lr=1e-3"
    pairs = {key: defaults[key] for key in _SETTINGS if key in defaults}
    decays = _class(value).__name__ == "AdamW"  # by default, so that 0 is a setting
    pairs = {k: v for k, v in pairs.items() if _OFF.get(k) != v or (decays and k == "weight_decay")}
    return ", ".join(f"{key}={pair!r}" for key, pair in pairs.items())
