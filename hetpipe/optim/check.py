"""Accepts optimizers of hetpipe and of torch; refuses other objects with the line to write."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import Optimizer

if TYPE_CHECKING:
    from torch import Tensor

OPTIMIZERS = (
    "adadelta", "adagrad", "adam", "adamax", "adamw", "lamb", "lion", "nadam", "rmsprop", "sgd",
)  # fmt: skip
"""The names of hetpipe's optimizers."""


def check_optimizer(
    value: object, parameters: Mapping[str, Tensor], ema: float | None = None
) -> Optimizer:
    """Return `value`, an optimizer of hetpipe or of torch, as an optimizer for these parameters.

    `parameters` are the parameters of model and loss, by name. With `ema`, a decay, the optimizer
    also averages them. Raises `HetpipeError` for everything else, with the line to write, for an
    optimizer of torch that does not fit, see `from_torch`, and for weights in float16.
    """
    for name, parameter in parameters.items():
        if parameter.requires_grad and str(parameter.dtype) == "torch.float16":
            raise HetpipeError(
                f"{name} is a torch.float16 parameter, too coarse for updates: convert the model "
                "with model.float(), and let passes compute in halves with precision='float16'"
            )
    if not isinstance(value, type) and _of_torch(value):
        from hetpipe.optim.torch_optimizer import from_torch  # it loads torch

        value = from_torch(value)  # type: ignore[arg-type]
    if isinstance(value, Optimizer):
        named = value.named(parameters)
        if ema is None:
            return named
        from hetpipe.optim.average import with_average  # it loads torch

        return with_average(named, ema)
    raise HetpipeError(f"optimizer is {_describe(value)}; {_cure(value)}")


def _describe(value: object) -> str:
    if value is None or isinstance(value, (str, Real)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if _ours(value):
        return f"the function {_ours(value)} itself"
    return f"a {type(value).__name__}"


def _cure(value: object) -> str:
    if isinstance(value, type) and _of_torch(value):
        return f"write torch.optim.{value.__name__}(model.parameters())"
    if name := _ours(value):
        return f"write hp.optim.{name}(lr=1e-3)"
    return f"write hp.optim.adamw(lr=1e-3), or another of {', '.join(OPTIMIZERS)}"


def _of_torch(value: object) -> bool:
    """Return whether a value is torch's optimizer or optimizer class, without importing torch."""
    kind = value if isinstance(value, type) else type(value)
    names = ((cls.__module__, cls.__name__) for cls in kind.__mro__)
    return ("torch.optim.optimizer", "Optimizer") in names


def _ours(value: object) -> str:
    """Return the name of a function of `hp.optim` that was passed without a call, or ""."""
    inside = str(getattr(value, "__module__", "")).startswith("hetpipe.optim")
    name = str(getattr(value, "__name__", ""))
    return name if inside and callable(value) and name in OPTIMIZERS else ""
