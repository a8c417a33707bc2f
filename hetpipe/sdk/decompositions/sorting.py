"""Sorting and searching by comparisons.

The place of an element is the number of elements that go before it. Sorting n elements takes n * n
comparisons, which all run in parallel and need no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


def sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sorted values and their indices. Equal elements keep their order."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    order = order_of(x, dim, descending)
    return torch.gather(x, dim, order), order


def stable_sort(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """Sort, as `sort` does: it is always stable."""
    return sort(x, dim, descending)


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


def _median(x: Tensor, dim: int, keepdim: bool, skips_nan: bool) -> tuple[Tensor, Tensor]:
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


def median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the median, the lower one of two middle elements; NaN if there is one."""
    return _median(x, dim, keepdim, skips_nan=False)


def nanmedian(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the median of the elements other than NaN."""
    return _median(x, dim, keepdim, skips_nan=True)


def whole_median(x: Tensor) -> Tensor:
    """Return the median of all elements."""
    return median(x.reshape(-1), 0)[0]


def whole_nanmedian(x: Tensor) -> Tensor:
    """Return the median of all elements other than NaN."""
    return nanmedian(x.reshape(-1), 0)[0]


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
    """Count the elements of a sorted sequence that go before a number."""
    return searchsorted(sorted_sequence, sorted_sequence.new_full((), value), **how)


def bucketize(
    values: Tensor, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    """Return the number of the bucket that holds each value."""
    return searchsorted(boundaries, values, out_int32=out_int32, right=right)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.sort.default: sort,
    aten.sort.stable: stable_sort,
    aten.topk.default: topk,
    aten.kthvalue.default: kthvalue,
    aten.median.dim: median,
    aten.nanmedian.dim: nanmedian,
    aten.median.default: whole_median,
    aten.nanmedian.default: whole_nanmedian,
    aten.mode.default: mode,
    aten.searchsorted.Tensor: searchsorted,
    aten.searchsorted.Scalar: searchsorted_scalar,
    aten.bucketize.Tensor: bucketize,
}
"""Decompositions by operator."""
