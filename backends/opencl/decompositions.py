"""Activations in the parts that their derivatives have in common with them.

The derivative is computed in the forward, where its input is at hand; written alike, both share one
evaluation of the error function or the exponential, in one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten


def shared_with_derivatives() -> Mapping[Any, Callable[..., Any]]:
    """Decompositions of activations, in the terms in which core ATen decomposes their backward."""
    return {aten.gelu.default: gelu, aten.silu.default: silu}


def gelu(x: torch.Tensor, *, approximate: str = "none") -> Any:
    """x times the normal distribution function, exact; the approximation stays one operator."""
    if approximate != "none":
        return NotImplemented
    return x * ((torch.erf(x * math.sqrt(0.5)) + 1) * 0.5)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x times the logistic function."""
    return x * (1 / (1 + torch.exp(-x)))
