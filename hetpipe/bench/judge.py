"""A step of eager torch in float64, and how far another step's gradients are from it.

See `hetpipe.bench.parity`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hetpipe.capture.example import call
from hetpipe.zoo.workload import Workload

Tensors = Mapping[str, torch.Tensor]

ZERO = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Share of the norm of all gradients below which one is zero, by the judge's dtype."""
WIDE_PARAMETERS = 300_000_000
"""Up to so many parameters the judge computes in float64."""


@dataclass(frozen=True)
class Step:
    """A step's loss, gradients and new parameters."""

    loss: float
    gradients: Tensors
    updated: Tensors = field(default_factory=dict)


def judging_dtype(size: int) -> torch.dtype:
    """The judge's dtype for so many parameters."""
    return torch.float64 if size <= WIDE_PARAMETERS else torch.float32


def step_of_torch(
    workload: Workload, model: nn.Module, batch: tuple[Any, Any], dtype: torch.dtype
) -> Step:
    """Loss and gradients of eager torch; gradients are rounded to float32, for memory."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    model = copy.deepcopy(model).to(dtype)
    model.zero_grad()
    x, y = tree_map(cast, batch)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # of tensors that the model makes
    try:
        loss = workload.loss_fn(call(model, x), y)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
    finally:
        torch.set_default_dtype(default)
    named = model.named_parameters()
    return Step(loss.item(), {name: p.grad.float() for name, p in named if p.grad is not None})


def gradient_errors(actual: Tensors, right: Tensors, zero: float) -> dict[str, float]:
    """Relative errors by norms; infinite where a value is not finite, or one lacks a gradient.

    Gradients below the share `zero` of the norm of all are compared with that norm.
    """
    norms = {name: float(tensor.double().norm()) for name, tensor in right.items()}
    whole = math.hypot(*norms.values()) or 1.0
    errors = {}
    for name in {**right, **actual}:
        if name in actual and name in right:
            wrong = float((actual[name].double() - right[name].double()).norm())
            error = wrong / (norms[name] if norms[name] > zero * whole else whole)
        else:  # None is as good as zero
            error = math.inf if bool({**actual, **right}[name].any()) else 0.0
        errors[name] = error if math.isfinite(error) else math.inf
    return errors
