"""Longer functions: convolution and pooling by windows (im2col), random numbers, LSTM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def windows(x: Array, kernel: Sequence[int], how: Sequence[Any], value: float = 0.0) -> Any:
    """Return the padded x [..., height, width], and a view of its windows [..., i, j, *kernel]."""
    stride, padding, dilation = how
    widths = [(0, 0)] * (x.ndim - 2) + [(p, p) for p in padding]
    padded = np.pad(x, widths, constant_values=value)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(padded, spans, (-2, -1), writeable=True)
    return padded, view[..., :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def convolution(x: Array, w: Array, bias: Array | None, *geometry: Any) -> Any:
    """Compute aten.convolution: x [n, g c, height, width], w [g o, c, h, w] -> y [n, g o, i, j]."""
    *how, _, _, groups = geometry
    _, view = windows(x.reshape(len(x), groups, -1, *x.shape[2:]), w.shape[2:], how)
    w_ = w.reshape(groups, -1, *w.shape[1:])
    y = np.einsum("ngcijhw,gochw->ngoij", view, w_, optimize=True)
    y = y.reshape(len(x), len(w), *y.shape[3:])
    return y if bias is None else y + bias[:, None, None]


def convolution_backward(dy: Array, x: Array, w: Array, sizes: Any, *geometry: Any) -> Any:
    """Compute aten.convolution_backward: gradients of x, w and bias; None if not in the mask."""
    *how, _, _, groups, mask = geometry
    (top, left), (height, width) = how[1], x.shape[2:]
    dy_, x_ = (a.reshape(len(a), groups, -1, *a.shape[2:]) for a in (dy, x))
    w_ = w.reshape(groups, -1, *w.shape[1:])
    parts = np.einsum("ngoij,gochw->ngcijhw", dy_, w_, optimize=True)
    dx, view = windows(np.zeros_like(x_), w.shape[2:], how)
    for place in np.ndindex(*w.shape[2:]):  # at one kernel place, windows share no element
        view[(..., *place)] += parts[(..., *place)]
    dx = dx[..., top : top + height, left : left + width].reshape(x.shape)
    _, view = windows(x_, w.shape[2:], how)
    dw = np.einsum("ngoij,ngcijhw->gochw", dy_, view, optimize=True).reshape(w.shape)
    gradients = (dx, dw, dy.sum((0, 2, 3)))
    return [g if want else None for g, want in zip(gradients, mask, strict=True)]


def max_pool2d(x: Array, kernel: Sequence[int], *rest: Any) -> Any:
    """Compute aten.max_pool2d_with_indices: values and their indices in the flat plane."""
    stride, padding, dilation = (*rest, *((), (0, 0), (1, 1))[len(rest) :])[:3]
    plane = np.arange(math.prod(x.shape[-2:])).reshape(x.shape[-2:])
    how = (stride or kernel, padding, dilation)
    views = (windows(x, kernel, how, -math.inf)[1], windows(plane, kernel, how)[1])
    values, places = (view.reshape(*view.shape[:-2], -1) for view in views)
    rows_and_columns = np.indices(places.shape[:2], sparse=True)
    return values.max(-1), places[(*rows_and_columns, values.argmax(-1))]


MASK = 0xFFFFFFFF


def philox(counter: Any, key: tuple[int, int]) -> Array:
    """Apply ten rounds of Philox 4x32 to the four words (uint64) of `counter`.

    The result has a last dimension of 4 words (Salmon et al., Parallel random numbers: as easy as
    1, 2, 3, SC 2011).
    """
    c0, c1, c2, c3 = counter
    low, half = np.uint64(MASK), np.uint64(32)
    for i in range(10):
        k0 = np.uint64((key[0] + i * 0x9E3779B9) & MASK)
        k1 = np.uint64((key[1] + i * 0xBB67AE85) & MASK)
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
    return np.stack([c0, c1, c2, c3], axis=-1)  # the rounds broadcast all four words to one shape


def uniform(rng: Array, site: int, size: Sequence[int], batch_dim: int, samples: int) -> Array:
    """Compute hetpipe.uniform: float32 [*size] in [0, 1); rng: seed, step, first sample's index."""
    seed, step, first = map(int, rng)
    each = math.prod(size) // samples
    sample = (first + np.arange(samples)[:, None]) & MASK
    counter = (np.arange(-(-each // 4)), sample, site & MASK, step & MASK)
    words = philox([np.asarray(c, np.uint64) for c in counter], (seed & MASK, seed >> 32 & MASK))
    drawn = (words.reshape(samples, -1)[:, :each] >> np.uint64(8)) * np.float32(2.0**-24)
    moved = (size[batch_dim], *size[:batch_dim], *size[batch_dim + 1 :])
    return np.moveaxis(drawn.astype(np.float32).reshape(moved), 0, batch_dim)


def keep_mask(rng: Array, site: int, size: Sequence[int], keep: float, *how: int) -> Array:
    """Compute hetpipe.keep_mask: bool [*size], true with probability `keep` in float32."""
    return uniform(rng, site, size, *how) < np.float32(keep)


def _sigmoid(x: Array) -> Any:
    return 1 / (1 + np.exp(-x))


def lstm(gates_x: Array, h: Array, c: Array, w_hh: Array) -> tuple[Array, Array, Array]:
    """Compute hetpipe.lstm: (y, c, gates); shapes as in `hetpipe.sdk.operators.recurrent`."""
    steps = []
    for x in gates_x:
        i, f, g, o = np.split(x + h @ w_hh.T, 4, axis=1)
        i, f, g, o = _sigmoid(i), _sigmoid(f), np.tanh(g), _sigmoid(o)
        c = f * c + i * g
        h = o * np.tanh(c)
        steps.append((h, c, np.concatenate([i, f, g, o], axis=1)))
    y, every_c, gates = map(np.stack, zip(*steps, strict=True))
    return y, every_c, gates


def lstm_backward(
    grad_y: Array, grad_last_c: Array | None, gates: Array, c: Array, c0: Array, w_hh: Array
) -> tuple[Array, Array, Array]:
    """Compute hetpipe.lstm_backward: (grad_gates_x, grad_h0, grad_c0)."""
    dh = np.zeros_like(c0)
    dc = dh if grad_last_c is None else grad_last_c
    grad_gates = np.empty_like(gates)
    for t in reversed(range(len(c))):
        i, f, g, o = np.split(gates[t], 4, axis=1)
        before, squashed = c[t - 1] if t else c0, np.tanh(c[t])
        dh = dh + grad_y[t]
        dc = dc + dh * o * (1 - squashed**2)
        di, df, do = dc * g * i * (1 - i), dc * before * f * (1 - f), dh * squashed * o * (1 - o)
        grad_gates[t] = np.concatenate([di, df, dc * i * (1 - g**2), do], axis=1)
        dc = dc * f
        dh = grad_gates[t] @ w_hh
    return grad_gates, dh, dc
