"""A step of eager torch in float64, and which of its gradients float32 determines.

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

GRADIENT_LIMIT = 1e-3
"""The largest relative error of a gradient, by norms."""
ZERO = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Share of the norm of all gradients below which one is zero, by the judge's dtype."""
WIDE_PARAMETERS = 300_000_000
"""Up to so many parameters the judge computes in float64."""
EXCESS_LIMIT = 4.0
"""A tensor in doubt may be off by so many times its doubt."""
DOUBTFUL = GRADIENT_LIMIT / EXCESS_LIMIT
"""The doubt from which on a tensor is in doubt: there the bounds meet."""
ROUNDING = 2.0**-24
"""Relative change of parameters for the doubt: that of rounding them to float32."""
DRAWS = 2
"""Steps in float64 with such changes."""
MINI_BATCHES = 4
"""Mini-batches of which one is chosen."""
LARGE_PARAMETERS = 5_000_000
"""From so many on the first is taken: of the many decisions of a large model some are always close.
"""


@dataclass(frozen=True)
class Step:
    """A step's loss, gradients and new parameters."""

    loss: float
    gradients: Tensors
    updated: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Right:
    """A mini-batch, torch's step on it in a dtype, and the doubt of each gradient."""

    batch: tuple[Any, Any]
    step: Step
    doubt: Mapping[str, float]
    dtype: torch.dtype

    @property
    def in_doubt(self) -> int:
        """The number of tensors in doubt."""
        return sum(not doubt <= DOUBTFUL for doubt in self.doubt.values())


def right_step(workload: Workload, model: nn.Module, samples: int, size: int) -> Right:
    """The first mini-batch without doubt, or that of the fewest tensors in doubt."""
    dtype = torch.float64 if size <= WIDE_PARAMETERS else torch.float32
    best: Right | None = None
    for seed in range(MINI_BATCHES):
        batch = next(workload.batches(samples, seed))
        step = _by_torch(workload, model, batch, dtype)
        found = Right(batch, step, _doubt(workload, model, batch, step, dtype), dtype)
        if best is None or found.in_doubt < best.in_doubt:
            best = found
        if best.in_doubt == 0 or size >= LARGE_PARAMETERS:
            break
    assert best is not None
    return best


def _doubt(
    workload: Workload, model: nn.Module, batch: tuple[Any, Any], step: Step, dtype: torch.dtype
) -> dict[str, float]:
    """By tensor; 0 if the judge is no wider than the device."""
    doubt = dict.fromkeys(step.gradients, 0.0)
    if dtype == torch.float32:
        return doubt
    others = [(model, torch.float32), *((_rounded(model, n), dtype) for n in range(DRAWS))]
    for other, own in others:
        gradients = _by_torch(workload, other, batch, own).gradients
        for name, error in gradient_errors(gradients, step.gradients, ZERO[dtype]).items():
            doubt[name] = max(doubt[name], error)
    return doubt


def _rounded(model: nn.Module, seed: int) -> nn.Module:
    """The model in float64 with a small relative error in each parameter."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        for parameter in model.parameters():
            off = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.mul_(1 + ROUNDING * (2 * off - 1))
    return model


def _by_torch(
    workload: Workload, model: nn.Module, batch: tuple[Any, Any], dtype: torch.dtype
) -> Step:
    """Loss and gradients of eager torch."""

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
    return Step(loss.item(), {name: p.grad for name, p in named if p.grad is not None})


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
