"""Operators in terms that suit the kernels here better than core ATen's.

Activations are written in the parts that their derivatives have in common with them: the derivative
is computed in the forward, where its input is at hand, and so both share one evaluation of the
error function or the exponential, in one kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """By operator, to be applied before core ATen's own."""
    return {aten.gelu.default: gelu, aten.silu.default: silu, aten.cumsum.default: cumsum}


def gelu(x: torch.Tensor, *, approximate: str = "none") -> Any:
    """x times the normal distribution function, exact; the approximation stays one operator."""
    if approximate != "none":
        return NotImplemented
    return x * ((torch.erf(x * math.sqrt(0.5)) + 1) * 0.5)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x times the logistic function."""
    return x * (1 / (1 + torch.exp(-x)))


def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Each element a sum over those up to it: n/2 times the additions, but one parallel kernel."""
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.int64
    if x.dim() == 0:
        return x.to(dtype)
    place = torch.arange(x.shape[dim], device=x.device)
    reached = place[:, None] >= place[None]
    before = torch.where(reached, x.to(dtype).movedim(dim, -1).unsqueeze(-2), 0)
    return before.sum(-1).movedim(-1, dim)
