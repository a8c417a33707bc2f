"""A layer of an LSTM, step by step; shapes as in `hetpipe.sdk.operators.recurrent`."""

from __future__ import annotations

from typing import Any

import numpy as np

from .convolution import Array


def _sigmoid(x: Array) -> Any:
    return 1 / (1 + np.exp(-x))


def lstm(gates_x: Array, h: Array, c: Array, w_hh: Array) -> tuple[Array, Array, Array]:
    """Compute hetpipe.lstm: (y, c, gates)."""
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
