"""Convolution and max pooling in two dimensions, through windows of the padded input (im2col)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def windows(x: Array, kernel: Sequence[int], how: Sequence[Any], value: float = 0.0) -> Any:
    """Return x [..., height, width] padded, and its windows, a view [..., rows, cols, *kernel]."""
    stride, padding, dilation = how
    widths = [(0, 0)] * (x.ndim - 2) + [(p, p) for p in padding]
    padded = np.pad(x, widths, constant_values=value)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(padded, spans, (-2, -1), writeable=True)
    return padded, view[..., :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def convolution(x: Array, w: Array, bias: Array | None, *geometry: Any) -> Any:
    """Compute aten.convolution.

    x [n, g * c, height, width], w [g * o, c, h, w] -> y [n, g * o, i, j].
    """
    *how, _, _, groups = geometry
    _, view = windows(x.reshape(len(x), groups, -1, *x.shape[2:]), w.shape[2:], how)
    w_ = w.reshape(groups, -1, *w.shape[1:])
    y = np.einsum("ngcijhw,gochw->ngoij", view, w_, optimize=True)
    y = y.reshape(len(x), len(w), *y.shape[3:])
    return y if bias is None else y + bias[:, None, None]


def convolution_backward(dy: Array, x: Array, w: Array, sizes: Any, *geometry: Any) -> Any:
    """Compute aten.convolution_backward: gradients of x, w and bias; None if masked out."""
    *how, _, _, groups, mask = geometry
    (top, left), (height, width) = how[1], x.shape[2:]
    dy_, x_ = (a.reshape(len(a), groups, -1, *a.shape[2:]) for a in (dy, x))
    w_ = w.reshape(groups, -1, *w.shape[1:])
    parts = np.einsum("ngoij,gochw->ngcijhw", dy_, w_, optimize=True)
    dx, view = windows(np.zeros_like(x_), w.shape[2:], how)
    for place in np.ndindex(*w.shape[2:]):  # windows overlap, but not at one place of the kernel
        view[(..., *place)] += parts[(..., *place)]
    dx = dx[..., top : top + height, left : left + width].reshape(x.shape)
    _, view = windows(x_, w.shape[2:], how)
    dw = np.einsum("ngoij,ngcijhw->gochw", dy_, view, optimize=True).reshape(w.shape)
    gradients = (dx, dw, dy.sum((0, 2, 3)))
    return [g if want else None for g, want in zip(gradients, mask, strict=True)]


def max_pool2d(x: Array, kernel: Sequence[int], *rest: Any) -> Any:
    """Compute aten.max_pool2d_with_indices: values and their places in the plane."""
    stride, padding, dilation = (*rest, *((), (0, 0), (1, 1))[len(rest) :])[:3]
    plane = np.arange(math.prod(x.shape[-2:])).reshape(x.shape[-2:])
    how = (stride or kernel, padding, dilation)
    views = (windows(x, kernel, how, -math.inf)[1], windows(plane, kernel, how)[1])
    values, places = (view.reshape(*view.shape[:-2], -1) for view in views)
    rows_and_columns = np.indices(places.shape[:2], sparse=True)
    return values.max(-1), places[(*rows_and_columns, values.argmax(-1))]
