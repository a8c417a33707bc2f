# mypy: disable-error-code="no-any-return"
# (numpy's functions return Any)
"""Pooling over windows; shapes as in `convolution.py`, an input without N is allowed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .convolution import Array, Ints, fold, pad, per_dim, windows


def _geometry(
    size: Ints, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Kernel, stride, low padding, dilation per dimension, and the high padding that is needed."""
    rank = len(size)
    k, p, d = (per_dim(v, rank) for v in (kernel, padding, dilation))
    s = per_dim(stride, rank) if stride else k
    high = []
    for a in range(rank):
        room = size[a] + 2 * p[a] - d[a] * (k[a] - 1) - 1
        out = (-(-room // s[a]) if ceil_mode else room // s[a]) + 1
        if ceil_mode and (out - 1) * s[a] >= size[a] + p[a]:  # a window must start in the input
            out -= 1
        high.append(max((out - 1) * s[a] + d[a] * (k[a] - 1) + 1 - size[a] - p[a], 0))
    return k, s, p, d, high


def max_pool2d(
    x: Array, kernel: Ints, stride: Ints = (), padding: Ints = (0,), dilation: Ints = (1,),
    ceil_mode: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """aten.max_pool2d_with_indices: values and their positions in the flattened plane."""
    planes = x.reshape(-1, 1, *x.shape[-2:])
    k, s, p, d, high = _geometry(x.shape[-2:], kernel, stride, padding, dilation, ceil_mode)
    view = windows(pad(planes, p, high, -math.inf), k, s, d)
    flat = view.reshape(*view.shape[:4], -1)
    best = flat.argmax(-1)
    row = best // k[1] * d[0] + (np.arange(best.shape[2]) * s[0] - p[0])[:, None]
    column = best % k[1] * d[1] + np.arange(best.shape[3]) * s[1] - p[1]
    shape = (*x.shape[:-2], *best.shape[2:])
    value = np.take_along_axis(flat, best[..., None], -1)
    return value.reshape(shape), (row * x.shape[-1] + column).reshape(shape)


def max_pool2d_backward(dy: Array, x: Array, *args: Any) -> Array:
    """aten.max_pool2d_with_indices_backward; the last argument holds the positions."""
    planes = math.prod(x.shape[:-2])
    dx = np.zeros((planes, x.shape[-2] * x.shape[-1]), dy.dtype)
    np.add.at(
        dx, (np.arange(planes)[:, None], args[-1].reshape(planes, -1)), dy.reshape(planes, -1)
    )
    return dx.reshape(x.shape)


def _divisor(
    size: Ints, k: Ints, s: Ints, p: Ints, high: Ints, count_padding: bool, override: int | None
) -> Any:
    """What each window's sum is divided by, [*out]."""
    if override is not None:
        return float(override)
    ones = np.ones((1, 1, *size))
    if count_padding:  # padding counts, what ceil_mode adds beyond it does not
        real = [min(a, b) for a, b in zip(p, high, strict=True)]
        ones = pad(ones, p, real, 1.0)
        beyond = [b - r for b, r in zip(high, real, strict=True)]
        ones = pad(ones, [0] * len(size), beyond)
    else:
        ones = pad(ones, p, high)
    return windows(ones, k, s, [1] * len(size)).sum(axis=tuple(range(-len(size), 0)))[0, 0]


def avg_pool2d(
    x: Array, kernel: Ints, stride: Ints = (), padding: Ints = (0,), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Array:  # fmt: skip
    """aten.avg_pool2d."""
    k, s, p, d, high = _geometry(x.shape[-2:], kernel, stride, padding, (1,), ceil_mode)
    view = windows(pad(x.reshape(-1, 1, *x.shape[-2:]), p, high), k, s, d)
    count = _divisor(x.shape[-2:], k, s, p, high, count_include_pad, divisor_override)
    y = (view.sum(axis=(-2, -1)) / count).astype(x.dtype)
    return y.reshape(*x.shape[:-2], *y.shape[-2:])


def avg_pool2d_backward(
    dy: Array, x: Array, kernel: Ints, stride: Ints, padding: Ints, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Array:  # fmt: skip
    """aten.avg_pool2d_backward."""
    (h, w) = x.shape[-2:]
    k, s, p, d, high = _geometry((h, w), kernel, stride, padding, (1,), ceil_mode)
    share = dy / _divisor((h, w), k, s, p, high, count_include_pad, divisor_override)
    planes = share.reshape(-1, 1, *dy.shape[-2:], 1, 1)
    spread = np.broadcast_to(planes, (*planes.shape[:4], *k))
    dx = fold(spread, (h + p[0] + high[0], w + p[1] + high[1]), s, d)
    return dx[..., p[0] : p[0] + h, p[1] : p[1] + w].reshape(x.shape)


def _bins(size: int, out: int) -> Array:
    """The matrix [out, size] that averages adaptively along one dimension."""
    matrix = np.zeros((out, size))
    for i in range(out):
        lo, hi = i * size // out, -(-(i + 1) * size // out)
        matrix[i, lo:hi] = 1 / (hi - lo)
    return matrix


def adaptive_avg_pool2d(x: Array, out: Ints) -> Array:
    """aten._adaptive_avg_pool2d."""
    return _bins(x.shape[-2], out[0]) @ x @ _bins(x.shape[-1], out[1]).T


def adaptive_avg_pool2d_backward(dy: Array, x: Array) -> Array:
    """aten._adaptive_avg_pool2d_backward."""
    return _bins(x.shape[-2], dy.shape[-2]).T @ dy @ _bins(x.shape[-1], dy.shape[-1])
