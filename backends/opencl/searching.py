"""Places found by comparisons, and writes through strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def searchsorted(
    sorted_sequence: Tensor, values: Tensor, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """How many elements of a sorted sequence go before each value; NaN goes last."""
    if sorter is not None:
        sorted_sequence = torch.gather(sorted_sequence, -1, sorter)
    # A sequence of one dimension serves values of any shape.
    one = sorted_sequence if sorted_sequence.dim() == 1 else sorted_sequence.unsqueeze(-2)
    other = values.unsqueeze(-1)
    before = ~(one > other) if right or side == "right" else ~(one >= other)
    return before.to(torch.int64).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def searchsorted_scalar(sorted_sequence: Tensor, value: float, **how: Any) -> Tensor:
    """The same for a number."""
    return searchsorted(sorted_sequence, sorted_sequence.new_full((), value), **how)


def bucketize(
    values: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    """The number of the bucket between boundaries."""
    return searchsorted(boundaries, values, out_int32=out_int32, right=right)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Elements of the flat tensor."""
    flat = x.reshape(-1)
    taken: Tensor = aten.index(flat, [index.reshape(-1)])
    return taken.reshape(index.shape)


def mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The smallest of the most frequent values, and its last index."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    moved = x.movedim(dim, -1)
    same = moved.unsqueeze(-1) == moved.unsqueeze(-2)
    count = same.to(torch.int64).sum(-1)
    frequent = count == count.amax(-1, keepdim=True)
    largest: float = math.inf
    if not x.is_floating_point():
        largest = 1 if x.dtype == torch.bool else torch.iinfo(x.dtype).max
    value = torch.where(frequent, moved, torch.full_like(moved, largest)).amin(-1, keepdim=True)
    number = torch.arange(moved.shape[-1], device=x.device)
    place = torch.where(moved == value, number, -1).amax(-1, keepdim=True)
    both = value.movedim(-1, dim), place.movedim(-1, dim)
    return both if keepdim else (both[0].squeeze(dim), both[1].squeeze(dim))


def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:  # fmt: skip
    """`x` with the elements that strides name replaced."""
    place = torch.full((), storage_offset or 0, dtype=torch.int64, device=x.device)
    for count, step in zip(size, stride, strict=True):
        place = place.unsqueeze(-1) + torch.arange(count, device=x.device) * step
    values = source.reshape(-1).to(x.dtype)
    flat: Tensor = aten.index_put(x.reshape(-1), [place.reshape(-1)], values)
    return flat.reshape(x.shape)


def _pairs(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first and the second row of each pair of rows, in order."""
    number = torch.arange(rows * (rows - 1) // 2, device=device)
    before = torch.arange(rows, device=device)
    # Row i stands first in rows - 1 - i pairs, after those of the rows before it.
    begins = torch.div(before * (2 * rows - 1 - before), 2, rounding_mode="floor")
    first = (begins.unsqueeze(0) <= number.unsqueeze(1)).to(torch.int64).sum(1) - 1
    first = first.clamp(max=max(rows - 2, 0))
    return first, number - begins.index_select(0, first) + first + 1


def pdist(x: Tensor, p: float = 2) -> Tensor:
    """Distances of all pairs of rows, in the norm p."""
    first, second = _pairs(x.shape[0], x.device)
    apart: Tensor = aten._cdist_forward(x, x, p, None)
    return apart.reshape(-1).index_select(0, first * x.shape[0] + second)


def pdist_backward(gradient: Tensor, x: Tensor, p: float, distance: Tensor) -> Tensor:
    """The gradient by the rows: that of all distances, each of which stands once in `distance`."""
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
    """The gradient of the sum over other classes of max(0, margin - x[target] + x)^p / classes."""
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
    """The gradient of the sum over labels j and others i of max(0, 1 - x[j] + x[i]) / classes."""
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1, x.shape[-1])
    other = is_target.reshape(rows.shape) == 0
    # Labels end before the first negative one.
    known = (labels < 0).to(torch.int64).cumsum(1) == 0
    place = labels.clamp(min=0)
    gap = 1 - torch.gather(rows, 1, place).unsqueeze(2) + rows.unsqueeze(1)
    counts = known.unsqueeze(2) & other.unsqueeze(1) & (gap > 0)
    slope = counts.to(x.dtype)
    by_others, by_labels = slope.sum(1), torch.where(known, slope.sum(2), 0.0)
    total = by_others.scatter_add(1, place, -by_labels) / x.shape[-1]
    return (total * _shared(gradient, rows.shape[0], reduction)).reshape(x.shape)


def _shared(gradient: Tensor, rows: int, reduction: int) -> Tensor:
    """The loss's gradient for each row: of a mean (1), of a sum (2), or of each row's own loss."""
    if reduction == 0:
        return gradient.reshape(-1, 1)
    return gradient / rows if reduction == 1 else gradient


SEARCHING: Mapping[Any, Callable[..., Any]] = {
    aten.searchsorted.Tensor: searchsorted, aten.searchsorted.Scalar: searchsorted_scalar,
    aten.bucketize.Tensor: bucketize, aten.take.default: take, aten.mode.default: mode,
    aten.as_strided_scatter.default: as_strided_scatter, aten._pdist_forward.default: pdist,
    aten._pdist_backward.default: pdist_backward,
    aten.multi_margin_loss_backward.default: multi_margin_backward,
    aten.multilabel_margin_loss_backward.default: multilabel_margin_backward,
}  # fmt: skip
"""Decompositions by operator."""
