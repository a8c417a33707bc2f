"""The judge: a step of eager torch in float64, and the errors of other steps relative to the judge.

`hetpipe.bench.parity` explains the comparison.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from hetpipe.bench.filed import Filed, activations_filed
from hetpipe.capture.export.example import call
from hetpipe.check.reference import default_dtype, with_rounding_errors
from hetpipe.optim.rule import Optimizer
from hetpipe.train.eager import torch_optimizer
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Tensors = Mapping[str, torch.Tensor]
_Model = TypeVar("_Model", bound=nn.Module)

ZERO = 1e-10
"""A gradient counts as zero if its norm is below this share of the norm of all gradients."""
NOISY = 4
"""Number of float32 steps with added rounding errors, which show the effect of rounding."""
PIECE = 1 << 22  # the most elements of a parameter that `update_error` updates at once


@dataclass(frozen=True)
class Step:
    """A step's loss and gradients."""

    loss: float
    gradients: Tensors


def with_same_parameters(model: _Model) -> _Model:
    """Return a copy of `model` that shares its parameters, but not its modules and buffers."""
    same: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, same)


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a copy of the model that has no dropout, and shares the model's parameters."""
    model = with_same_parameters(model)
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    return model


def step_of_torch(
    workload: Workload, model: nn.Module, batch: tuple[Any, Any], dtype: torch.dtype
) -> Step:
    """Return loss and gradients of eager torch, with little memory even for large models.

    Parameters are cast to `dtype` in place, and then back, which restores their values. Activations
    of large models stay in a file until the backward reads them. Each new gradient is rounded to
    float32, saved to a file, and dropped from the model.
    """

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    def take(name: str) -> Callable[[torch.Tensor], None]:
        def taken(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            gradients.file(name, parameter.grad.float())
            parameter.grad = None

        return taken

    gradients = Filed()
    x, y = tree_map(cast, batch)
    with _cast(model, dtype) as wide, ExitStack() as hooks:
        for name, parameter in wide.named_parameters():
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(take(name))  # type: ignore[no-untyped-call]
                hooks.callback(handle.remove)
        with default_dtype(dtype), activations_filed(wide):
            loss = workload.loss_fn(call(wide, x), y)
            loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
            loss.backward()
        return Step(loss.item(), gradients)


def steps_in_float32(
    workload: Workload, model: nn.Module, batch: tuple[Any, Any]
) -> Iterator[Step]:
    """Yield a step of eager torch in float32, then steps with errors added to modules' results.

    A single step does not show the effect of rounding. Its error may be small by chance, and a
    value within rounding error of a rectifier's threshold may fall on either side.
    """
    yield step_of_torch(workload, model, batch, torch.float32)
    for seed in range(NOISY):
        generator = torch.Generator().manual_seed(seed)
        noisy = with_same_parameters(model)
        for module in noisy.modules():
            if next(module.children(), None) is None:
                module.register_forward_hook(partial(_disturbed, generator))
        yield step_of_torch(workload, noisy, batch, torch.float32)


def _disturbed(generator: torch.Generator, module: nn.Module, args: Any, result: Any) -> Any:
    return tree_map(partial(with_rounding_errors, generator=generator, units=1.0), result)


@contextmanager
def _cast(model: nn.Module, dtype: torch.dtype) -> Iterator[nn.Module]:
    """Cast the model's parameters, yield a copy of the model with them, and cast them back."""
    dtypes = [(parameter, parameter.dtype) for parameter in model.parameters()]
    try:
        yield with_same_parameters(model).to(dtype)
    finally:
        for parameter, own in dtypes:
            parameter.data = parameter.data.to(own)


class Distance:
    """Relative errors of gradients, by norms.

    If the right gradient counts as zero (`ZERO`), the error is relative to the norm of all
    gradients.
    """

    def __init__(self, right: Tensors) -> None:
        self._right = right
        self._norms = {name: _norm(tensor) for name, tensor in right.items()}
        self._whole = math.hypot(*self._norms.values()) or 1.0

    def of(self, name: str, gradient: torch.Tensor | None) -> float:
        """Return the error of a parameter's gradient.

        It is infinite if a value is not finite, or if one side lacks a gradient that is not zero on
        the other side.
        """
        right = self._right.get(name)
        if gradient is None or right is None:
            other = right if gradient is None else gradient
            return math.inf if other is not None and bool(other.any()) else 0.0
        norm = self._norms[name]
        error = _norm(gradient - right)
        error /= norm if norm > ZERO * self._whole else self._whole
        return error if math.isfinite(error) else math.inf


def gradient_errors(actual: Tensors, right: Tensors) -> dict[str, float]:
    """Return the errors of all gradients, see `Distance`."""
    distance = Distance(right)
    names = dict.fromkeys((*right, *actual))
    return {name: distance.of(name, actual.get(name)) for name in names}


def update_error(
    rule: Optimizer,
    name: str,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    updated: torch.Tensor,
) -> float:
    """Return the relative error of a new parameter, compared with torch's optimizer in float64.

    Large tensors are compared in pieces to save memory; the optimizers treat each element
    separately.
    """
    wrong, norm = 0.0, 0.0
    pieces = (torch.split(each.reshape(-1), PIECE) for each in (parameter, gradient, updated))
    for old, slope, new in zip(*pieces, strict=True):
        right = nn.Parameter(old.double())
        right.grad = slope.double()
        torch_optimizer(rule, {name: right}).step()
        wrong = math.hypot(wrong, _norm(new.double() - right.detach()))
        norm = math.hypot(norm, _norm(right.detach()))
    error = wrong / max(norm, 1e-30)
    return error if math.isfinite(error) else math.inf


def _norm(tensor: torch.Tensor) -> float:
    """Return the norm of a tensor, summed in float64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


LOSS_LIMIT = 1e-4  # the largest relative error of a loss
GRADIENT_LIMIT = 1e-3  # the largest relative error of a gradient, by norms
UPDATE_LIMIT = 1e-5  # the largest relative error of an updated parameter, by norms


@dataclass(frozen=True)
class Errors:
    """Relative errors of a step: the loss, the gradients (their number is `tensors`), the updates.

    `worst` names the gradient with the largest error. `crossing` is the largest error of tensors
    that leave a layer, if layers are compared separately. These errors leave out all results for
    which torch's float32 operators also exceed the limit: `undetermined` names such gradients, and
    `passed` counts such tensors that leave a layer.
    """

    loss: float
    gradient: float
    worst: str
    tensors: int
    update: float
    crossing: float = 0.0
    undetermined: tuple[str, ...] = ()
    passed: int = 0

    def within(self, gradient_limit: float, loss_limit: float = LOSS_LIMIT) -> bool:
        """Return whether all errors are within their limits."""
        return (
            self.loss <= loss_limit
            and max(self.gradient, self.crossing) <= gradient_limit
            and self.update <= UPDATE_LIMIT
        )


@dataclass
class Comparison:
    """Comparison of a device's gradients and updates with the judge's, one parameter at a time."""

    rule: Optimizer
    parameters: Mapping[str, torch.Tensor]
    distance: Distance
    seconds: float = 0.0  # spent comparing
    gradients: dict[str, float] = field(default_factory=dict)  # errors so far, by parameter
    _update: float = 0.0

    def see(self, name: str, gradient: Array, updated: Array | None) -> None:
        """Compare a parameter's gradient, and its new value unless `updated` is None."""
        begin_s = time.perf_counter()
        slope = torch.from_numpy(gradient)
        self.gradients[name] = self.distance.of(name, slope)
        if updated is not None:
            new = torch.from_numpy(updated)
            error = update_error(self.rule, name, self.parameters[name], slope, new)
            self._update = max(self._update, error)
        self.seconds += time.perf_counter() - begin_s

    def errors(self, loss: float, right: Step, undetermined: tuple[str, ...] = ()) -> Errors:
        """Return the errors of the step; leave out the gradients that `undetermined` names.

        A gradient that the device lacks has an infinite error, unless the judge's gradient is zero.
        """
        missing = right.gradients.keys() - self.gradients.keys()
        gradients = {name: self.distance.of(name, None) for name in missing} | self.gradients
        counted = {name: error for name, error in gradients.items() if name not in undetermined}
        return replace(_errors(loss, right, counted, self._update), undetermined=undetermined)


def errors_of(step: Step, right: Step) -> Errors:
    """Return the errors of a step's loss and gradients; the error of its updates is 0."""
    return _errors(step.loss, right, gradient_errors(step.gradients, right.gradients), 0.0)


def _errors(loss: float, right: Step, gradients: Mapping[str, float], update: float) -> Errors:
    worst = max(gradients, key=gradients.__getitem__, default="")
    return Errors(
        loss=abs(loss - right.loss) / max(abs(right.loss), 1e-30),
        gradient=gradients.get(worst, 0.0),
        worst=worst,
        tensors=len(gradients),
        update=update,
    )
