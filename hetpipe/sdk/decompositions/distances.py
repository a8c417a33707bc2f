"""Distances between rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def cdist(a: Tensor, b: Tensor, p: float, mode: int | None = None) -> Tensor:
    """Return the distances of all rows of `a` from all rows of `b`, in the norm p."""
    gaps = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 0:
        return (gaps != 0).to(a.dtype).sum(-1)
    if p == math.inf:
        return gaps.amax(-1) if gaps.shape[-1] else gaps.sum(-1)
    if p == 2:
        return (gaps * gaps).sum(-1).sqrt()
    return gaps.sum(-1) if p == 1 else gaps.pow(p).sum(-1).pow(1 / p)


def cdist_backward(gradient: Tensor, a: Tensor, b: Tensor, p: float, distance: Tensor) -> Tensor:
    """Return the gradient by `a`; it is 0 where two rows are equal."""
    gaps = a.unsqueeze(-2) - b.unsqueeze(-3)
    sign, size, d = gaps.sign(), gaps.abs(), distance.unsqueeze(-1)
    if p == 0:
        slope = torch.zeros_like(gaps)
    elif p == 1:
        slope = sign
    elif p == math.inf:
        slope = sign * (size == d).to(a.dtype)
    else:
        slope = torch.where(d == 0, torch.zeros_like(gaps), sign * (size / d).pow(p - 1))
        slope = torch.where(size == 0, torch.zeros_like(gaps), slope)
    return (gradient.unsqueeze(-1) * slope).sum(-2)


def _pairs(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the first and the second row of each pair of rows, in order."""
    number = torch.arange(rows * (rows - 1) // 2, device=device)
    before = torch.arange(rows, device=device)
    # Row i is the first row of rows - 1 - i pairs, which follow the pairs of the rows before it.
    begins = torch.div(before * (2 * rows - 1 - before), 2, rounding_mode="floor")
    first = (begins.unsqueeze(0) <= number.unsqueeze(1)).to(torch.int64).sum(1) - 1
    first = first.clamp(max=max(rows - 2, 0))
    return first, number - begins.index_select(0, first) + first + 1


def pdist(x: Tensor, p: float = 2) -> Tensor:
    """Return the distances of all pairs of rows, in the norm p."""
    first, second = _pairs(x.shape[0], x.device)
    apart: Tensor = aten._cdist_forward(x, x, p, None)
    return apart.reshape(-1).index_select(0, first * x.shape[0] + second)


def pdist_backward(gradient: Tensor, x: Tensor, p: float, distance: Tensor) -> Tensor:
    """Return the gradient by the rows, through the matrix of all distances."""
    rows = x.shape[0]
    first, second = _pairs(rows, x.device)
    places = [torch.cat([first, second]), torch.cat([second, first])]
    zeros = x.new_zeros(rows, rows)
    wide = aten.index_put(zeros, places, torch.cat([gradient, gradient]))
    apart = aten.index_put(zeros, places, torch.cat([distance, distance]))
    total: Tensor = aten._cdist_backward(wide, x, x, p, apart)
    return total


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten._cdist_forward.default: cdist,
    aten._cdist_backward.default: cdist_backward,
    aten._pdist_forward.default: pdist,
    aten._pdist_backward.default: pdist_backward,
}
"""Decompositions by operator."""
