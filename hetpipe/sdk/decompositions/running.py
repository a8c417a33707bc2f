"""Running results along a dimension.

Each element is computed from all elements before it: more operations than a loop, but in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def _reached(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return all elements j beside each element i, in the last dimension, and whether j <= i."""
    number = torch.arange(x.shape[dim], device=x.device)
    return x.movedim(dim, -1).unsqueeze(-2), number.unsqueeze(0) <= number.unsqueeze(1)


def _running(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    if x.dim() == 0 or x.numel() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    seen, reached = _reached(x, dim)
    if x.is_floating_point():
        neutral: float = -math.inf if largest else math.inf
    else:
        limits = torch.iinfo(x.dtype) if x.dtype != torch.bool else None
        neutral = (limits.min if largest else limits.max) if limits else not largest
    known = torch.where(reached, seen, torch.full_like(seen, neutral))
    best = known.amax(-1) if largest else known.amin(-1)
    same = seen == best.unsqueeze(-1)
    if x.is_floating_point():
        same = same | (torch.isnan(seen) & torch.isnan(best.unsqueeze(-1)))
    number = torch.arange(x.shape[dim], device=x.device)
    last = torch.where(reached & same, number, -1).amax(-1)
    return best.movedim(-1, dim), last.movedim(-1, dim)


def cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the largest element so far, and its last index."""
    return _running(x, dim, largest=True)


def cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the smallest element so far, and its last index."""
    return _running(x, dim, largest=False)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """Return the logarithm of the sum of exponentials so far."""
    if x.dim() == 0:
        return x.clone()
    largest = cummax(x, dim)[0].movedim(dim, -1).unsqueeze(-1)
    shift = torch.where(largest.abs() == math.inf, torch.zeros_like(largest), largest)
    seen, reached = _reached(x, dim)
    terms = torch.where(reached, torch.exp(seen - shift), 0.0)
    return (terms.sum(-1).log() + shift.squeeze(-1)).movedim(-1, dim)


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the product of the elements so far."""
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.int64
    x = x.to(dtype)
    if x.dim() == 0:
        return x
    seen, reached = _reached(x, dim)
    return torch.where(reached, seen, torch.ones_like(seen)).prod(-1).movedim(-1, dim)


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of the elements so far."""
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.int64
    if x.dim() == 0:
        return x.to(dtype)
    place = torch.arange(x.shape[dim], device=x.device)
    reached = place[:, None] >= place[None]
    before = torch.where(reached, x.to(dtype).movedim(dim, -1).unsqueeze(-2), 0)
    return before.sum(-1).movedim(-1, dim)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.cummax.default: cummax,
    aten.cummin.default: cummin,
    aten.cumprod.default: cumprod,
    aten.cumsum.default: cumsum,
    aten.logcumsumexp.default: logcumsumexp,
}
"""Decompositions by operator."""
