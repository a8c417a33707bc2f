"""An LSTM layer (Hochreiter and Schmidhuber, 1997) as one operator, its loop over time inside.

    i, f, g, o = sigmoid, sigmoid, tanh, sigmoid of the quarters of gates_x[t] + h @ w_hh^T
    c = f * c + i * g;  h = o * tanh(c)

Shapes: gates_x and gates [T, N, 4H], y (every h), c (every cell state) and their gradients
[T, N, H], h0 and c0 [N, H], w_hh [4H, H]. gates_x is x @ w_ih^T + b_ih + b_hh, an ordinary product
outside; the gradient of w_hh is one outside as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


@torch.library.custom_op("hetpipe::lstm", mutates_args=())
def lstm(
    gates_x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, w_hh: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, c, gates); see the module for shapes. `gates` is i, f, g, o, for the backward alone."""
    y = gates_x.new_empty((gates_x.shape[0], *h0.shape))
    c, gates = torch.empty_like(y), gates_x.new_empty(gates_x.shape)
    weight, h, cell, hidden = w_hh.t(), h0, c0, h0.shape[1]
    for x, h_t, c_t, a in zip(gates_x, y, c, gates, strict=True):
        torch.addmm(x, h, weight, out=a)
        i, f, g, o = a.chunk(4, 1)
        a[:, : 2 * hidden].sigmoid_()  # i and f
        torch.mul(f, cell, out=c_t).addcmul_(i, g.tanh_())
        torch.tanh(c_t, out=h_t).mul_(o.sigmoid_())
        h, cell = h_t, c_t
    return y, c, gates


@torch.library.custom_op("hetpipe::lstm_backward", mutates_args=())
def lstm_backward(
    grad_y: torch.Tensor,
    grad_c: torch.Tensor | None,
    gates: torch.Tensor,
    c: torch.Tensor,
    c0: torch.Tensor,
    w_hh: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(grad_gates_x, grad_h0, grad_c0) of `lstm`, whose results are `c` and `gates`."""
    grads, h_by_c, f = _slopes(gates, c, c0)
    dh, dc = torch.zeros_like(c0), torch.zeros_like(c0)
    for t in reversed(range(c.shape[0])):
        dh += grad_y[t]
        if grad_c is not None:
            dc += grad_c[t]
        dc.addcmul_(dh, h_by_c[t])
        by_gates = grads[t].view(c0.shape[0], 4, -1)
        by_gates[:, :3] *= dc.unsqueeze(1)
        by_gates[:, 3] *= dh
        dc *= f[t]
        torch.mm(grads[t], w_hh, out=dh)
    return grads, dh, dc


def unrolled_lstm(
    gates_x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, w_hh: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`lstm` by operators of torch, step by step, changing nothing."""
    weight, h, c = w_hh.t(), h0, c0
    every_h, every_c, every_gates = [], [], []
    for x in gates_x.unbind(0):
        i, f, g, o = torch.addmm(x, h, weight).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = torch.addcmul(f * c, i, g)
        h = o * c.tanh()
        every_h.append(h)
        every_c.append(c)
        every_gates.append(torch.cat([i, f, g, o], 1))
    return torch.stack(every_h), torch.stack(every_c), torch.stack(every_gates)


def unrolled_lstm_backward(
    grad_y: torch.Tensor,
    grad_c: torch.Tensor | None,
    gates: torch.Tensor,
    c: torch.Tensor,
    c0: torch.Tensor,
    w_hh: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`lstm_backward` by operators of torch, step by step, changing nothing."""
    slopes, h_by_c, f = _slopes(gates, c, c0)
    dh = dc = torch.zeros_like(c0)
    grads = []
    for t in reversed(range(c.shape[0])):
        dh = dh + grad_y[t]
        dc = torch.addcmul(dc if grad_c is None else dc + grad_c[t], dh, h_by_c[t])
        grads.append(torch.cat([dc, dc, dc, dh], 1) * slopes[t])
        dc = dc * f[t]
        dh = grads[-1] @ w_hh
    return torch.stack(grads[::-1]), dh, dc


def _slopes(
    gates: torch.Tensor, c: torch.Tensor, c0: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Derivatives of all steps: (c, or h for o, by gates before squashing; h by c; f, c by c).

    Shapes: [T, N, 4H], [T, N, H], [T, N, H].
    """
    i, f, g, o = gates.chunk(4, 2)
    before = torch.cat([c0.unsqueeze(0), c[:-1]])
    squashed = c.tanh()
    by_gates = (
        aten.sigmoid_backward(g, i),
        aten.sigmoid_backward(before, f),
        aten.tanh_backward(i, g),
        aten.sigmoid_backward(squashed, o),
    )
    return torch.cat(by_gates, 2), aten.tanh_backward(o, squashed), f


@lstm.register_fake
def _(
    gates_x: torch.Tensor, h0: torch.Tensor, c0: torch.Tensor, w_hh: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    size = (gates_x.shape[0], *h0.shape)
    return gates_x.new_empty(size), gates_x.new_empty(size), gates_x.new_empty(gates_x.shape)


@lstm_backward.register_fake
def _(
    grad_y: torch.Tensor,
    grad_c: torch.Tensor | None,
    gates: torch.Tensor,
    c: torch.Tensor,
    c0: torch.Tensor,
    w_hh: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return gates.new_empty(gates.shape), c0.new_empty(c0.shape), c0.new_empty(c0.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    y, c, gates = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gates)
    ctx.save_for_backward(*inputs[1:], y, c, gates)


def _backward(ctx: Any, grad_y: Any, grad_c: Any, _: Any) -> tuple[torch.Tensor | None, ...]:
    h0, c0, w_hh, y, c, gates = ctx.saved_tensors
    if grad_y is None:
        grad_y = torch.zeros_like(y)
    grad_gates, grad_h0, grad_c0 = lstm_backward(grad_y, grad_c, gates, c, c0, w_hh)
    grad_w = None
    if ctx.needs_input_grad[3]:
        before = torch.cat([h0.unsqueeze(0), y[:-1]])
        grad_w = grad_gates.flatten(0, 1).t() @ before.flatten(0, 1)
    return grad_gates, grad_h0, grad_c0, grad_w


lstm.register_autograd(_backward, setup_context=_save)

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.hetpipe.lstm.default: unrolled_lstm,
    torch.ops.hetpipe.lstm_backward.default: unrolled_lstm_backward,
}
"""To core ATen, once its operators are decomposed in turn."""
