"""Convolution and pooling of any rank, through windows of the padded input.

Shapes: x [N, C, *size], w [O, C/groups, *kernel], y [N, O, *out]. P is the number of output
positions, K of kernel positions, G of groups.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Ints = Sequence[int]


def per_dim(value: Ints, rank: int) -> list[int]:
    return [int(v) for v in (list(value) * rank if len(value) == 1 else value)]


def windows(x: Array, kernel: Ints, stride: Ints, dilation: Ints) -> Array:
    """A view [N, C, *out, *kernel] of the padded x."""
    rank = len(kernel)
    spans = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))
    view = np.lib.stride_tricks.sliding_window_view(x, spans, tuple(range(2, 2 + rank)))
    steps = [slice(None, None, s) for s in (*stride, *dilation)]
    return view[(slice(None), slice(None), *steps)]


def fold(parts: Array, size: Ints, stride: Ints, dilation: Ints) -> Array:
    """The transpose of `windows`: sums [N, C, *out, *kernel] into [N, C, *size]."""
    rank = len(size)
    out, kernel = parts.shape[2 : 2 + rank], parts.shape[2 + rank :]
    x = np.zeros((*parts.shape[:2], *size), parts.dtype)
    for position in itertools.product(*map(range, kernel)):
        where = [
            slice(p * d, p * d + (o - 1) * s + 1, s)
            for p, d, o, s in zip(position, dilation, out, stride, strict=True)
        ]
        here: Any = (..., *position)
        x[(slice(None), slice(None), *where)] += parts[here]
    return x


def pad(x: Array, low: Ints, high: Ints, value: float = 0.0) -> Array:
    widths = [(0, 0), (0, 0), *zip(low, high, strict=True)]
    return np.pad(x, widths, constant_values=value) if any(low) or any(high) else x


def _columns(
    x: Array, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Array:
    """im2col: [G, N * P, C/G * K]."""
    rank, (n, c) = len(kernel), x.shape[:2]
    view = windows(pad(x, padding, padding), kernel, stride, dilation)
    view = view.reshape(n, groups, c // groups, *view.shape[2:])
    view = np.moveaxis(view, (1, 0), (0, 1))  # [G, N, C/G, *out, *kernel]
    view = np.moveaxis(view, 2, 2 + rank)
    return view.reshape(groups, n * math.prod(view.shape[2 : 2 + rank]), -1)


def _rows(y: Array, groups: int) -> Array:
    """[N, O, *out] -> [G, N * P, O/G]."""
    n, o = y.shape[:2]
    return np.moveaxis(y.reshape(n, groups, o // groups, -1), (1, 3), (0, 2)).reshape(
        groups, -1, o // groups
    )


def _forward(x: Array, w: Array, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Array:
    kernel = w.shape[2:]
    columns = _columns(x, kernel, stride, padding, dilation, groups)
    y = columns @ w.reshape(groups, w.shape[0] // groups, -1).swapaxes(1, 2)  # [G, N * P, O/G]
    out = [
        (s + 2 * p - d * (k - 1) - 1) // t + 1
        for s, p, d, k, t in zip(x.shape[2:], padding, dilation, kernel, stride, strict=True)
    ]
    y = np.moveaxis(y.reshape(groups, x.shape[0], math.prod(out), -1), (0, 3), (1, 2))
    return y.reshape(x.shape[0], w.shape[0], *out)


def _input_gradient(
    dy: Array, w: Array, size: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Array:
    n, rank, kernel = dy.shape[0], dy.ndim - 2, w.shape[2:]
    columns = _rows(dy, groups) @ w.reshape(groups, w.shape[0] // groups, -1)
    spread = columns.reshape(groups, n, *dy.shape[2:], w.shape[1], *kernel)
    spread = np.moveaxis(np.moveaxis(spread, 2 + rank, 2), 0, 1)  # [N, G, C/G, *out, *kernel]
    spread = spread.reshape(n, groups * w.shape[1], *dy.shape[2:], *kernel)
    padded = [s + 2 * p for s, p in zip(size, padding, strict=True)]
    dx = fold(spread, padded, stride, dilation)
    kept = [slice(p, p + s) for p, s in zip(padding, size, strict=True)]
    return dx[(slice(None), slice(None), *kept)]


def _weight_gradient(
    x: Array, dy: Array, shape: Ints, stride: Ints, padding: Ints, dilation: Ints, groups: int
) -> Array:
    columns = _columns(x, shape[2:], stride, padding, dilation, groups)
    return (_rows(dy, groups).swapaxes(1, 2) @ columns).reshape(shape)


def convolution(
    x: Array, w: Array, bias: Array | None, stride: Ints, padding: Ints, dilation: Ints,
    transposed: bool, output_padding: Ints, groups: int,
) -> Array:  # fmt: skip
    """aten.convolution."""
    rank = x.ndim - 2
    s, p, d = (per_dim(v, rank) for v in (stride, padding, dilation))
    if transposed:
        extra = per_dim(output_padding, rank)
        size = [
            (i - 1) * s[a] - 2 * p[a] + d[a] * (w.shape[2 + a] - 1) + extra[a] + 1
            for a, i in enumerate(x.shape[2:])
        ]
        y = _input_gradient(x, w, size, s, p, d, groups)
    else:
        y = _forward(x, w, s, p, d, groups)
    return y if bias is None else y + bias.reshape(-1, *(1,) * rank)


def convolution_backward(
    dy: Array, x: Array, w: Array, bias_sizes: Any, stride: Ints, padding: Ints, dilation: Ints,
    transposed: bool, output_padding: Ints, groups: int, output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
    """aten.convolution_backward: gradients of x, w and bias, each None where not asked for."""
    rank = x.ndim - 2
    geometry: Any = (*(per_dim(v, rank) for v in (stride, padding, dilation)), groups)
    dx = dw = db = None
    if output_mask[0] and transposed:
        dx = _forward(dy, w, *geometry)
    elif output_mask[0]:
        dx = _input_gradient(dy, w, x.shape[2:], *geometry)
    if output_mask[1]:
        big, small = (dy, x) if transposed else (x, dy)
        dw = _weight_gradient(big, small, w.shape, *geometry)
    if output_mask[2]:
        db = dy.sum(axis=(0, *range(2, dy.ndim)))
    return dx, dw, db
