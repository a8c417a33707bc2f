"""Reads and writes by index."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def scatter_mean(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Scatter a mean, as a sum divided by a count. Other reductions stay whole."""
    if reduce != "mean":
        return NotImplemented
    add = aten.scatter_reduce.two
    total = add(x, dim, index, source, "sum", include_self=include_self)
    ones = torch.ones_like(source)
    count = add(torch.ones_like(x), dim, index, ones, "sum", include_self=include_self)
    if x.is_floating_point():
        return total / count
    return torch.div(total, count, rounding_mode="floor")


def index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Reduce slices, each with one index, as a scatter that repeats the index for each element."""
    if x.dim() == 0:
        x, source = x.unsqueeze(0), source.reshape(1)
        return index_reduce(x, 0, index, source, reduce, include_self=include_self).squeeze(0)
    shape = [1] * source.dim()
    shape[dim] = -1
    wide = index.reshape(shape).expand(source.shape)
    return torch.scatter_reduce(x, dim, wide, source, reduce, include_self=include_self)


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Write `source` to elements of the flat tensor."""
    flat = x.reshape(-1).index_put([index.reshape(-1)], source.reshape(-1), accumulate)
    return flat.reshape(x.shape)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Read elements of the flat tensor."""
    flat = x.reshape(-1)
    taken: Tensor = aten.index(flat, [index.reshape(-1)])
    return taken.reshape(index.shape)


def masked_scatter(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Write the elements of `source`, in their order, where the mask is true."""
    x, mask = aten.broadcast_tensors([x, mask])
    number = mask.reshape(-1).to(torch.int64).cumsum(0) - 1
    taken = source.reshape(-1)[number.clamp(min=0)].reshape(x.shape)
    return torch.where(mask, taken, x)


def masked_scatter_backward(gradient: Tensor, mask: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the gradient of `source`: the elements where the mask is true, then zeros."""
    count = math.prod(sizes)
    flat = mask.expand_as(gradient).reshape(-1)
    number = (flat.to(torch.int64).cumsum(0) - 1).clamp(min=0, max=count - 1)
    value = torch.where(flat, gradient.reshape(-1), 0.0)
    return gradient.new_zeros(count).index_add(0, number, value).reshape(sizes)


def diagonal_scatter(
    x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    """Return `x` with `source` as its diagonal."""
    number = torch.arange(source.shape[-1], device=x.device)
    places = [*[None] * (x.dim() - 2), number + max(-offset, 0), number + max(offset, 0)]
    moved = x.movedim((dim1, dim2), (-2, -1))
    written: Tensor = aten.index_put(moved, places, source.to(x.dtype))
    return written.movedim((-2, -1), (dim1, dim2))


def as_strided_scatter(
    x: Tensor, source: Tensor, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> Tensor:  # fmt: skip
    """Return `x` with `source` at the places that size, strides and offset name."""
    place = torch.full((), storage_offset or 0, dtype=torch.int64, device=x.device)
    for count, step in zip(size, stride, strict=True):
        place = place.unsqueeze(-1) + torch.arange(count, device=x.device) * step
    values = source.reshape(-1).to(x.dtype)
    flat: Tensor = aten.index_put(x.reshape(-1), [place.reshape(-1)], values)
    return flat.reshape(x.shape)


def unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """Return all windows of `size` elements, `step` apart, in a new last dimension.

    torch's own decomposition uses `as_strided` with the strides of the tensor in torch's memory.
    There, a slice or a channels-last tensor has different strides than on a device.
    """
    if x.dim() == 0:
        return x.expand(1)[:size]
    dim %= x.dim()
    count = (x.shape[dim] - size) // step + 1
    first = torch.arange(count, device=x.device) * step
    place = first.unsqueeze(1) + torch.arange(size, device=x.device)
    taken = x.movedim(dim, -1).index_select(-1, place.reshape(-1))
    return taken.reshape(*taken.shape[:-1], count, size).movedim(-2, dim)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.as_strided_scatter.default: as_strided_scatter,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.index_reduce.default: index_reduce,
    aten.masked_scatter.default: masked_scatter,
    aten.masked_scatter_backward.default: masked_scatter_backward,
    aten.put.default: put,
    aten.scatter_reduce.two: scatter_mean,
    aten.take.default: take,
    aten.unfold.default: unfold,
}
