"""Decompositions of operators that core ATen keeps or does not know, and that have no kernel here.

Sorting counts: the place of an element is the number of those before it. That is n * n comparisons
for n elements, in kernels that all work-items share, and no memory for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .resized import RESIZED
from .searching import SEARCHING
from .special import SPECIAL
from .volumes import VOLUMES

aten = torch.ops.aten
Tensor = torch.Tensor

TORCHS = (
    aten._batch_norm_with_update_functional, aten.addmv, aten.as_strided_copy, aten.dist,
    aten.grid_sampler_2d,
    aten.ldexp, aten.linalg_vector_norm, aten.narrow_copy, aten.native_batch_norm,
    aten.native_group_norm, aten.permute_copy, aten.unbind_copy,
    aten.upsample_bicubic2d, aten.upsample_bilinear2d, aten.upsample_linear1d,
    aten.upsample_trilinear3d, aten.view_copy,
)  # fmt: skip
"""Operators of which torch has a decomposition that is not among those of core ATen."""


def further_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """By operator; those of operators with a kernel of their own are left out by the caller."""
    from torch._decomp import get_decompositions

    torchs = get_decompositions(TORCHS)
    return {**torchs, **OURS, **RESIZED, **SEARCHING, **SPECIAL, **VOLUMES}


def order_of(x: Tensor, dim: int, descending: bool = False) -> Tensor:
    """The indices that sort a dimension, equal elements in their order; NaN is the largest."""
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
    """Sorted values, and their indices; equal elements stay in their order."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    order = order_of(x, dim, descending)
    return torch.gather(x, dim, order), order


def stable_sort(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, Tensor]:
    """`sort`, which is stable anyhow."""
    return sort(x, dim, descending)


def topk(
    x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """The first k of a sorted dimension."""
    values, order = sort(x, dim, largest)
    if x.dim() == 0:
        return values, order
    return values.narrow(dim, 0, k), order.narrow(dim, 0, k)


def kthvalue(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The k-th smallest element, counted from 1."""
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
    """The lower one of two middle elements; NaN if there is one."""
    return _median(x, dim, keepdim, skips_nan=False)


def nanmedian(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower one of two middle elements among those that are not NaN."""
    return _median(x, dim, keepdim, skips_nan=True)


def whole_median(x: Tensor) -> Tensor:
    """The median of all elements."""
    return median(x.reshape(-1), 0)[0]


def whole_nanmedian(x: Tensor) -> Tensor:
    """The median of all elements that are not NaN."""
    return nanmedian(x.reshape(-1), 0)[0]


def _reached(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Element i's view of all elements j, in the last dimension, and whether j <= i."""
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
    """The largest element so far, and its last index."""
    return _running(x, dim, largest=True)


def cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The smallest element so far, and its last index."""
    return _running(x, dim, largest=False)


def logcumsumexp(x: Tensor, dim: int) -> Tensor:
    """The logarithm of the sum of exponentials so far."""
    if x.dim() == 0:
        return x.clone()
    largest = cummax(x, dim)[0].movedim(dim, -1).unsqueeze(-1)
    shift = torch.where(largest.abs() == math.inf, torch.zeros_like(largest), largest)
    seen, reached = _reached(x, dim)
    terms = torch.where(reached, torch.exp(seen - shift), 0.0)
    return (terms.sum(-1).log() + shift.squeeze(-1)).movedim(-1, dim)


def addbmm(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """The sum of a batch of products, scaled, beside `x`."""
    total = alpha * torch.bmm(a, b).sum(0)
    return total if beta == 0 else beta * x + total


def trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: Sequence[int], expand2: Sequence[int],
    expand3: Sequence[int], sumdim: Sequence[int], unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """The product of three tensors with dimensions of size 1 put in, summed over some."""
    product = None
    for factor, dims in ((a, expand1), (b, expand2), (c, expand3)):
        wide = factor
        for dim in sorted(dims):
            wide = wide.unsqueeze(dim)
        product = wide if product is None else product * wide
    assert product is not None
    return product.sum(list(sumdim)) if sumdim else product


def cdist(a: Tensor, b: Tensor, p: float, mode: int | None = None) -> Tensor:
    """Distances of all rows of `a` from all rows of `b`, in the norm p."""
    gaps = (a.unsqueeze(-2) - b.unsqueeze(-3)).abs()
    if p == 0:
        return (gaps != 0).to(a.dtype).sum(-1)
    if p == math.inf:
        return gaps.amax(-1) if gaps.shape[-1] else gaps.sum(-1)
    if p == 2:
        return (gaps * gaps).sum(-1).sqrt()
    return gaps.sum(-1) if p == 1 else gaps.pow(p).sum(-1).pow(1 / p)


def cdist_backward(gradient: Tensor, a: Tensor, b: Tensor, p: float, distance: Tensor) -> Tensor:
    """The gradient by `a`; 0 where two rows are the same."""
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


def scatter_mean(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """A mean as a sum and a count; the others have a kernel."""
    if reduce != "mean":
        return NotImplemented
    add = aten.scatter_reduce.two
    total = add(x, dim, index, source, "sum", include_self=include_self)
    ones, further = torch.ones_like(x), torch.ones_like(source)
    count = add(ones, dim, index, further, "sum", include_self=include_self)
    if x.is_floating_point():
        return total / count
    return torch.div(total, count, rounding_mode="floor")


def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """A scatter whose index is the same for whole slices."""
    if x.dim() == 0:
        x, source = x.unsqueeze(0), source.reshape(1)
        return index_reduce(x, 0, index, source, reduce, include_self=include_self).squeeze(0)
    shape = [1] * source.dim()
    shape[dim] = -1
    wide = index.reshape(shape).expand(source.shape)
    names = {"prod": "prod", "mean": "mean", "amax": "amax", "amin": "amin"}
    return torch.scatter_reduce(x, dim, wide, source, names[reduce], include_self=include_self)


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Writes at places of the flat tensor."""
    flat = x.reshape(-1).index_put([index.reshape(-1)], source.reshape(-1), accumulate)
    return flat.reshape(x.shape)


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The elements of `source` in order, where the mask holds."""
    x, mask = aten.broadcast_tensors([x, mask])
    number = mask.reshape(-1).to(torch.int64).cumsum(0) - 1
    taken = source.reshape(-1)[number.clamp(min=0)].reshape(x.shape)
    return torch.where(mask, taken, x)


def masked_scatter_backward(gradient: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """The gradient where the mask holds, in order, then zeros."""
    count = math.prod(sizes)
    flat = mask.expand_as(gradient).reshape(-1)
    number = (flat.to(torch.int64).cumsum(0) - 1).clamp(min=0, max=count - 1)
    value = torch.where(flat, gradient.reshape(-1), 0.0)
    return gradient.new_zeros(count).index_add(0, number, value).reshape(sizes)


def diagonal_scatter(
    x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """`x` with another diagonal."""
    number = torch.arange(source.shape[-1], device=x.device)
    places = [*[None] * (x.dim() - 2), number + max(-offset, 0), number + max(offset, 0)]
    moved = x.movedim((dim1, dim2), (-2, -1))
    written: Tensor = aten.index_put(moved, places, source.to(x.dtype))
    return written.movedim((-2, -1), (dim1, dim2))


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Cumulative product, each element from scratch."""
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.int64
    x = x.to(dtype)
    if x.dim() == 0:
        return x
    seen, reached = _reached(x, dim)
    return torch.where(reached, seen, torch.ones_like(seen)).prod(-1).movedim(-1, dim)


def round_decimals(x: Tensor, *, decimals: int) -> Tensor:
    """Rounded to so many decimals; to tens where they are negative."""
    ten = 10.0 ** abs(decimals)
    return torch.round(x * ten) / ten if decimals > 0 else torch.round(x / ten) * ten


def shrink_backward(gradient: Tensor, x: Tensor, lambd: float) -> Tensor:
    """Nothing passes where the function is 0."""
    return torch.where((x >= -lambd) & (x <= lambd), torch.zeros_like(gradient), gradient)


def angle(x: Tensor) -> Any:
    """0, or pi for negative numbers."""
    if x.is_complex() or not x.is_floating_point():
        return NotImplemented
    return torch.where(torch.isnan(x), x, torch.where(x < 0, math.pi, 0.0))


OURS: Mapping[Any, Callable[..., Any]] = {
    aten.sort.default: sort, aten.sort.stable: stable_sort, aten.topk.default: topk,
    aten.kthvalue.default: kthvalue, aten.median.dim: median, aten.nanmedian.dim: nanmedian,
    aten.median.default: whole_median, aten.nanmedian.default: whole_nanmedian,
    aten.cummax.default: cummax, aten.cummin.default: cummin,
    aten.logcumsumexp.default: logcumsumexp, aten.addbmm.default: addbmm,
    aten._trilinear.default: trilinear, aten._cdist_forward.default: cdist,
    aten._cdist_backward.default: cdist_backward, aten.scatter_reduce.two: scatter_mean,
    aten.index_reduce.default: index_reduce, aten.put.default: put,
    aten.masked_scatter.default: masked_scatter, aten.angle.default: angle,
    aten.masked_scatter_backward.default: masked_scatter_backward,
    aten.diagonal_scatter.default: diagonal_scatter, aten.cumprod.default: cumprod,
    aten.hardshrink_backward.default: shrink_backward,
    aten.softshrink_backward.default: shrink_backward,
    aten.round.decimals: round_decimals,
}  # fmt: skip
