"""Operators as short formulas: on elements, distances between rows, gradients of margin losses."""

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
    """Return the gradient of `hardshrink` or `softshrink`: 0 where the function is 0."""
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


def cdist(a: Tensor, b: Tensor, p: float, mode: int | None = None) -> Tensor:
    """Return the distances between all rows of `a` and all rows of `b`, in the p-norm."""
    gaps = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 0:
        return (gaps != 0).to(a.dtype).sum(-1)
    if p == math.inf:
        return gaps.amax(-1) if gaps.shape[-1] else gaps.sum(-1)
    if p == 2:
        return (gaps * gaps).sum(-1).sqrt()
    return gaps.sum(-1) if p == 1 else gaps.pow(p).sum(-1).pow(1 / p)


def cdist_backward(gradient: Tensor, a: Tensor, b: Tensor, p: float, distance: Tensor) -> Tensor:
    """Return the gradient with respect to `a`; equal rows contribute 0."""
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
    # Row i is the first row of rows - 1 - i pairs, which follow the pairs of all earlier rows.
    begins = torch.div(before * (2 * rows - 1 - before), 2, rounding_mode="floor")
    first = (begins.unsqueeze(0) <= number.unsqueeze(1)).to(torch.int64).sum(1) - 1
    first = first.clamp(max=max(rows - 2, 0))
    return first, number - begins.index_select(0, first) + first + 1


def pdist(x: Tensor, p: float = 2) -> Tensor:
    """Return the distances of all pairs of rows, in the p-norm."""
    first, second = _pairs(x.shape[0], x.device)
    apart: Tensor = aten._cdist_forward(x, x, p, None)
    return apart.reshape(-1).index_select(0, first * x.shape[0] + second)


def pdist_backward(gradient: Tensor, x: Tensor, p: float, distance: Tensor) -> Tensor:
    """Return the gradient with respect to the rows, through the matrix of all distances."""
    rows = x.shape[0]
    first, second = _pairs(rows, x.device)
    places = [torch.cat([first, second]), torch.cat([second, first])]
    zeros = x.new_zeros(rows, rows)
    wide = aten.index_put(zeros, places, torch.cat([gradient, gradient]))
    apart = aten.index_put(zeros, places, torch.cat([distance, distance]))
    total: Tensor = aten._cdist_backward(wide, x, x, p, apart)
    return total


def multi_margin_backward(
    gradient: Tensor, x: Tensor, target: Tensor, p: float, margin: float,
    weight: Tensor | None = None, reduction: int = 1,
) -> Tensor:  # fmt: skip
    """Return the gradient of `multi_margin_loss`.

    The loss of a row is the sum of max(0, margin - x[target] + x)^p / classes over all classes
    except for the target.
    """
    rows, classes = x.reshape(-1, x.shape[-1]), x.shape[-1]
    target = target.reshape(-1, 1)
    gap = margin - torch.gather(rows, 1, target) + rows
    other = torch.arange(classes, device=x.device) != target
    slope = torch.where(other & (gap > 0), torch.ones_like(gap) if p == 1 else 2 * gap, 0.0)
    if weight is not None:
        slope = slope * weight.index_select(0, target.reshape(-1)).unsqueeze(1)
    slope = torch.where(other, slope, -slope.sum(1, keepdim=True)) / classes
    return (slope * _shared(gradient, rows.shape[0], reduction)).reshape(x.shape)


def multilabel_margin_backward(
    gradient: Tensor, x: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Tensor:
    """Return the gradient of `multilabel_margin_loss`.

    The loss of a row sums max(0, 1 - x[j] + x[i]) / classes over labels j and all classes i
    without a label.
    """
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1, x.shape[-1])
    other = is_target.reshape(rows.shape) == 0
    # The labels of a row end before its first negative number.
    known = (labels < 0).to(torch.int64).cumsum(1) == 0
    place = labels.clamp(min=0)
    gap = 1 - torch.gather(rows, 1, place).unsqueeze(2) + rows.unsqueeze(1)
    counts = known.unsqueeze(2) & other.unsqueeze(1) & (gap > 0)
    slope = counts.to(x.dtype)
    by_others, by_labels = slope.sum(1), torch.where(known, slope.sum(2), 0.0)
    total = by_others.scatter_add(1, place, -by_labels) / x.shape[-1]
    return (total * _shared(gradient, rows.shape[0], reduction)).reshape(x.shape)


def _shared(gradient: Tensor, rows: int, reduction: int) -> Tensor:
    """Return the gradient of each row's loss; `reduction` is none (0), mean (1) or sum (2)."""
    if reduction == 0:
        return gradient.reshape(-1, 1)
    return gradient / rows if reduction == 1 else gradient


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten._trilinear.default: trilinear,
    aten.addbmm.default: addbmm,
    aten.angle.default: angle,
    aten.hardshrink_backward.default: shrink_backward,
    aten.round.decimals: round_decimals,
    aten.softshrink_backward.default: shrink_backward,
    aten._cdist_forward.default: cdist,
    aten._cdist_backward.default: cdist_backward,
    aten._pdist_forward.default: pdist,
    aten._pdist_backward.default: pdist_backward,
    aten.multi_margin_loss_backward.default: multi_margin_backward,
    aten.multilabel_margin_loss_backward.default: multilabel_margin_backward,
}
