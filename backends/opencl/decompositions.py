"""Decompositions that suit the kernels here better than core ATen's.

An activation and its derivative have parts in common. The derivative is computed in the forward,
where its input is at hand, so that one kernel evaluates the error function or the exponential once
for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Decompositions by operator, applied before core ATen's."""
    return {
        aten.gelu_backward.default: gelu_backward,
        aten.silu.default: silu,
        aten.cumsum.default: cumsum,
        aten.take.default: take,
    }


def gelu_backward(dy: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> Any:
    """dy times the distribution function and x times its density, by the terms of gelu's lowering.

    The approximation is x p with p = (1 + tanh(u)) / 2, the logistic function of 2 u.
    """
    if approximate != "none":
        scale, cubic = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        p = 1 / (1 + torch.exp(-2 * scale * (x + cubic * (square * x))))
        slope = 2 * scale * (1 + 3 * cubic * square)
        return dy * (p + x * slope * (p * (1 - p)))
    root = x * math.sqrt(0.5)
    density = torch.exp(-(root * root)) * (1 / math.sqrt(2 * math.pi))
    return dy * ((torch.erf(root) + 1) * 0.5 + x * density)


def silu(x: torch.Tensor) -> torch.Tensor:
    """x times the logistic function."""
    return x * (1 / (1 + torch.exp(-x)))


def cumsum(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Cumulative sum, each element from scratch: n/2 times the additions, one parallel kernel."""
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.int64
    if x.dim() == 0:
        return x.to(dtype)
    place = torch.arange(x.shape[dim], device=x.device)
    reached = place[:, None] >= place[None]
    before = torch.where(reached, x.to(dtype).movedim(dim, -1).unsqueeze(-2), 0)
    return before.sum(-1).movedim(-1, dim)


def take(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Elements of the flat tensor. Core ATen's `flat[index]` asks an index of one element."""
    flat: torch.Tensor = aten.index.Tensor(x.reshape(-1), [index.reshape(-1)])
    return flat.reshape(index.shape)
