"""Sorting, searching and running results, by comparisons of all pairs of elements.

The place of an element is the number of elements that go before it. Sorting n elements takes n * n
comparisons, which can all run in parallel. A running result computes each element from all elements
up to it: this takes more operations than a loop, but all run in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def order_of(x: Tensor, dim: int, descending: bool = False) -> Tensor:
    """Return the indices that sort a dimension, stably; NaN is the largest."""
    moved = x.movedim(dim, -1)
    one, other = moved.unsqueeze(-1), moved.unsqueeze(-2)
    lower, upper = (one, other) if descending else (other, one)
    before, equal = lower < upper, one == other
    if x.is_floating_point():
        before = before | (torch.isnan(upper) & ~torch.isnan(lower))
        equal = equal | (torch.isnan(one) & torch.isnan(other))
    number = torch.arange(moved.shape[-1], device=x.device)
    earlier = number.unsqueeze(0) < number.unsqueeze(1)
    place = (before | (equal & earlier)).to(torch.int64).sum(-1)
    taken = place.unsqueeze(-2) == number.unsqueeze(-1)
    return torch.where(taken, number, 0).sum(-1).movedim(-1, dim)


def sort(
    x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sorted values and their indices. Equal elements always keep their order."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    order = order_of(x, dim, descending)
    return torch.gather(x, dim, order), order


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the first k elements of a sorted dimension, and their indices."""
    values, order = sort(x, dim, largest)
    if x.dim() == 0:
        return values, order
    return values.narrow(dim, 0, k), order.narrow(dim, 0, k)


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the k-th smallest element, counted from 1, and its index."""
    values, order = sort(x, dim)
    if x.dim() == 0:
        return values, order
    both = values.narrow(dim, k - 1, 1), order.narrow(dim, k - 1, 1)
    return both if keepdim else (both[0].squeeze(dim), both[1].squeeze(dim))


def median(skips_nan: bool, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return the median, the lower one of two middle elements, and its index along `dim`.

    The median is NaN if an element is NaN, unless `skips_nan` is true. Without `dim`, return only
    the median of all elements.
    """
    if dim is None:
        return median(skips_nan, x.reshape(-1), 0)[0]
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, order = sort(x, dim)
    size = x.shape[dim]
    middle = torch.full_like(values.select(dim, 0), (size - 1) // 2, dtype=torch.int64)
    if x.is_floating_point():
        numbers = (~torch.isnan(values)).to(torch.int64).sum(dim)
        if skips_nan:
            middle = ((numbers - 1).clamp(min=0) / 2).floor().to(torch.int64)
        else:
            middle = torch.where(numbers < size, numbers, middle)  # the first NaN
    at = middle.unsqueeze(dim)
    both = torch.gather(values, dim, at), torch.gather(order, dim, at)
    return both if keepdim else (both[0].squeeze(dim), both[1].squeeze(dim))


def mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the smallest of the most frequent values, and its last index."""
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


def searchsorted(
    sorted_sequence: Tensor, values: Tensor, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Count the elements of a sorted sequence that go before each value; NaN goes last."""
    if sorter is not None:
        sorted_sequence = torch.gather(sorted_sequence, -1, sorter)
    # A sequence of one dimension serves values of any shape.
    one = sorted_sequence if sorted_sequence.dim() == 1 else sorted_sequence.unsqueeze(-2)
    other = values.unsqueeze(-1)
    before = ~(one > other) if right or side == "right" else ~(one >= other)
    return before.to(torch.int64).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def searchsorted_scalar(sorted_sequence: Tensor, value: float, **how: Any) -> Tensor:
    return searchsorted(sorted_sequence, sorted_sequence.new_full((), value), **how)


def bucketize(
    values: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    """Return the number of the bucket that holds each value."""
    return searchsorted(boundaries, values, out_int32=out_int32, right=right)


def _reached(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return all elements j for each element i, in the last dimension, and whether j <= i."""
    number = torch.arange(x.shape[dim], device=x.device)
    return x.movedim(dim, -1).unsqueeze(-2), number.unsqueeze(0) <= number.unsqueeze(1)


def running_extreme(largest: bool, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the largest (or smallest) element so far, and its last index."""
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


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    if x.dim() == 0:
        return x.clone()
    largest = running_extreme(True, x, dim)[0].movedim(dim, -1).unsqueeze(-1)
    shift = torch.where(largest.abs() == math.inf, torch.zeros_like(largest), largest)
    seen, reached = _reached(x, dim)
    terms = torch.where(reached, torch.exp(seen - shift), 0.0)
    return (terms.sum(-1).log() + shift.squeeze(-1)).movedim(-1, dim)


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.int64
    x = x.to(dtype)
    if x.dim() == 0:
        return x
    seen, reached = _reached(x, dim)
    return torch.where(reached, seen, torch.ones_like(seen)).prod(-1).movedim(-1, dim)


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.int64
    if x.dim() == 0:
        return x.to(dtype)
    place = torch.arange(x.shape[dim], device=x.device)
    reached = place[:, None] >= place[None]
    before = torch.where(reached, x.to(dtype).movedim(dim, -1).unsqueeze(-2), 0)
    return before.sum(-1).movedim(-1, dim)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten.topk.default: topk,
    aten.kthvalue.default: kthvalue,
    aten.median.dim: partial(median, False),
    aten.nanmedian.dim: partial(median, True),
    aten.median.default: partial(median, False),
    aten.nanmedian.default: partial(median, True),
    aten.mode.default: mode,
    aten.searchsorted.Tensor: searchsorted,
    aten.searchsorted.Scalar: searchsorted_scalar,
    aten.bucketize.Tensor: bucketize,
    aten.cummax.default: partial(running_extreme, True),
    aten.cummin.default: partial(running_extreme, False),
    aten.cumprod.default: cumprod,
    aten.cumsum.default: cumsum,
    aten.logcumsumexp.default: logcumsumexp,
}
