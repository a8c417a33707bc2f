"""Views of tensors as changes of layout, by torch's rules; no view copies memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .expr import Layout, Shape


def permute(layout: Layout, order: Sequence[int]) -> Layout:
    """Return the layout whose dimension `i` is dimension `order[i]` of `layout`."""
    shape = tuple(layout.shape[d] for d in order)
    return Layout(shape, tuple(layout.strides[d] for d in order), layout.offset)


def order_of(layout: Layout) -> list[int]:
    """Return the dimensions by decreasing stride.

    Permuting by this order makes a permuted row-major tensor row-major again.
    """
    strides = list(layout.strides)
    for d in reversed(range(len(strides) - 1)):
        if layout.shape[d] == 1:  # it has no stride, so it keeps its place
            strides[d] = strides[d + 1]
    return sorted(range(len(strides)), key=lambda d: -strides[d])


def narrow(layout: Layout, dim: int, start: int, length: int, step: int = 1) -> Layout:
    """Return `length` elements of `dim` from `start` on, every `step`th; -1 walks backwards."""
    shape, strides = list(layout.shape), list(layout.strides)
    offset = layout.offset + start * strides[dim]
    shape[dim], strides[dim] = length, strides[dim] * step
    return Layout(tuple(shape), tuple(strides), offset)


def select(layout: Layout, dim: int, index: int) -> Layout:
    """Return the layout at one index of a dimension, without that dimension."""
    offset = layout.offset + index * layout.strides[dim]
    shape, strides = list(layout.shape), list(layout.strides)
    del shape[dim], strides[dim]
    return Layout(tuple(shape), tuple(strides), offset)


def unsqueeze(layout: Layout, dim: int) -> Layout:
    """Insert a dimension of size 1 before `dim`."""
    shape, strides = list(layout.shape), list(layout.strides)
    shape.insert(dim, 1)
    strides.insert(dim, 0)
    return Layout(tuple(shape), tuple(strides), layout.offset)


def reshape(layout: Layout, shape: Shape) -> Layout | None:
    """Return the same elements in the same order as `shape`; None if no strides express it."""
    if math.prod(shape) == 0:
        return Layout(shape, (0,) * len(shape), layout.offset)
    runs = runs_of(layout)
    strides = [0] * len(shape)
    d = len(shape) - 1
    while runs:
        size, stride = runs.pop()
        while size > 1:
            while shape[d] == 1:
                d -= 1
            if size % shape[d]:
                return None
            strides[d] = stride
            stride *= shape[d]
            size //= shape[d]
            d -= 1
    return Layout(shape, tuple(strides), layout.offset)


def runs_of(layout: Layout) -> list[tuple[int, int]]:
    """Return (size, innermost stride) of the fewest dimensions with the same elements in order."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(layout.shape, layout.strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs
