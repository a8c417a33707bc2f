"""Operators in a few operations on elements, and two products of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def round_decimals(x: Tensor, *, decimals: int) -> Tensor:
    """Round to a number of decimals; a negative number rounds to tens, hundreds and so on."""
    ten = 10.0 ** abs(decimals)
    return torch.round(x * ten) / ten if decimals > 0 else torch.round(x / ten) * ten


def shrink_backward(gradient: Tensor, x: Tensor, lambd: float) -> Tensor:
    """Return the gradient, 0 where the function is 0."""
    return torch.where((x >= -lambd) & (x <= lambd), torch.zeros_like(gradient), gradient)


def angle(x: Tensor) -> Any:
    """Return 0, or pi for negative numbers."""
    if x.is_complex() or not x.is_floating_point():
        return NotImplemented
    return torch.where(torch.isnan(x), x, torch.where(x < 0, math.pi, 0.0))


def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Add the scaled sum of a batch of products to `x`."""
    total = alpha * torch.bmm(a, b).sum(0)
    return total if beta == 0 else beta * x + total


def trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """Multiply three tensors after inserting dimensions of size 1, and sum over `sumdim`."""
    product = None
    for factor, dims in ((a, expand1), (b, expand2), (c, expand3)):
        wide = factor
        for dim in sorted(dims):
            wide = wide.unsqueeze(dim)
        product = wide if product is None else product * wide
    assert product is not None
    return product.sum(list(sumdim)) if sumdim else product


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten._trilinear.default: trilinear,
    aten.addbmm.default: addbmm,
    aten.angle.default: angle,
    aten.hardshrink_backward.default: shrink_backward,
    aten.round.decimals: round_decimals,
    aten.softshrink_backward.default: shrink_backward,
}
"""Decompositions by operator."""
