"""Two operators: an LSTM layer (Hochreiter and Schmidhuber, 1997), and its loop over time.

    i, f, g, o = sigmoid, sigmoid, tanh, sigmoid of the quarters of gates_x[t] + h @ w_hh^T
    c = f * c + i * g;  h = o * tanh(c)

`lstm_layer` takes x, for libraries with a kernel for the whole layer. It decomposes into ordinary
products and `lstm`, which takes gates_x = x @ w_ih^T + bias. `lstm` decomposes into operators of
torch.

Shapes: x [T, N, I], w_ih [4H, I], w_hh [4H, H], bias (torch's two, added) [4H], gates_x and gates
[T, N, 4H], y (every h), c (every cell state) and grad_y [T, N, H], h0, c0 and last_c [N, H].
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from hetpipe.sdk.operators.custom import define, operator

aten = torch.ops.aten


@operator("lstm")
def lstm(gates_x: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, c, gates), with i, f, g, o side by side. The operator has no derivative."""
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


@operator("lstm_backward")
def lstm_backward(
    grad_y: Tensor, grad_last_c: Tensor | None, gates: Tensor, c: Tensor, c0: Tensor, w_hh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad_gates_x, grad_h0, grad_c0) of `lstm`, from its `c` and `gates`."""
    grads, h_by_c, f = _slopes(gates, c, c0)
    dh = torch.zeros_like(c0)
    dc = torch.zeros_like(c0) if grad_last_c is None else grad_last_c.clone()
    for t in reversed(range(c.shape[0])):
        dh += grad_y[t]
        dc.addcmul_(dh, h_by_c[t])
        by_gates = grads[t].view(c0.shape[0], 4, -1)
        by_gates[:, :3] *= dc.unsqueeze(1)
        by_gates[:, 3] *= dh
        dc *= f[t]
        torch.mm(grads[t], w_hh, out=dh)
    return grads, dh, dc


def unrolled_lstm(
    gates_x: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `lstm` by operators of torch, step by step, without mutation."""
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
    grad_y: Tensor, grad_last_c: Tensor | None, gates: Tensor, c: Tensor, c0: Tensor, w_hh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `lstm_backward` by operators of torch, step by step, without mutation."""
    slopes, h_by_c, f = _slopes(gates, c, c0)
    dh = torch.zeros_like(c0)
    dc = dh if grad_last_c is None else grad_last_c
    grads = []
    for t in reversed(range(c.shape[0])):
        dh = dh + grad_y[t]
        dc = torch.addcmul(dc, dh, h_by_c[t])
        grads.append(torch.cat([dc, dc, dc, dh], 1) * slopes[t])
        dc = dc * f[t]
        dh = grads[-1] @ w_hh
    return torch.stack(grads[::-1]), dh, dc


def _slopes(gates: Tensor, c: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three derivatives for all steps.

    The first [T, N, 4H] is of c (quarters i, f, g) or h (quarter o) with respect to the gates
    before squashing. The second [T, N, H] is of h with respect to c. The third [T, N, H] is of c
    with respect to the previous c; it equals f.
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
def _(gates_x: Tensor, h0: Tensor, c0: Tensor, w_hh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = (gates_x.shape[0], *h0.shape)
    return gates_x.new_empty(size), gates_x.new_empty(size), gates_x.new_empty(gates_x.shape)


@lstm_backward.register_fake
def _(grad_y: Any, grad_last_c: Any, gates: Any, c: Any, c0: Any, *_: Any) -> tuple[Tensor, ...]:
    return gates.new_empty(gates.shape), c0.new_empty(c0.shape), c0.new_empty(c0.shape)


def layer(
    x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `lstm_layer` by a product and `lstm`."""
    gates_x = F.linear(x.flatten(0, 1), w_ih, bias).view(*x.shape[:2], -1)
    y, c, gates = torch.ops.hetpipe.lstm(gates_x, h0, c0, w_hh)
    return y, c[-1].clone(), c, gates


def layer_backward(
    grad_y: Tensor,
    grad_last_c: Tensor | None,
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    bias: Tensor | None,
    y: Tensor,
    last_c: Tensor,
    c: Tensor,
    gates: Tensor,
) -> tuple[Tensor, ...]:
    """Compute `lstm_layer_backward` by products and `lstm_backward`."""
    back = torch.ops.hetpipe.lstm_backward
    grad_gates, grad_h0, grad_c0 = back(grad_y, grad_last_c, gates, c, c0, w_hh)
    flat = grad_gates.flatten(0, 1)
    before = torch.cat([h0.unsqueeze(0), y[:-1]])
    by_weights = (flat.t() @ x.flatten(0, 1), flat.t() @ before.flatten(0, 1), flat.sum(0))
    return (grad_gates @ w_ih, grad_h0, grad_c0, *by_weights)


_X = "Tensor x, Tensor h0, Tensor c0, Tensor w_ih, Tensor w_hh, Tensor? bias"
_Y = "Tensor y, Tensor last_c, Tensor c, Tensor gates"

lstm_layer = define("lstm_layer", layer, schema=f"({_X}) -> ({_Y})")
"""Returns (y, last_c, c, gates). Only `lstm_layer_backward` reads c and gates: a backend with a
kernel for the layer may return other tensors, of any shape, instead."""


def is_workspace(node: fx.Node) -> bool:
    """Return whether a node is `lstm_layer`'s c or gates, which only their own backend reads."""
    source = node.args[0] if node.target is getitem else None
    if not isinstance(source, fx.Node) or source.target is not torch.ops.hetpipe.lstm_layer.default:
        return False
    return node.args[1] in (2, 3)


lstm_layer_backward = define(
    "lstm_layer_backward",
    layer_backward,
    schema=f"(Tensor grad_y, Tensor? grad_last_c, {_X}, {_Y})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""Returns the gradients of x, h0, c0, w_ih, w_hh and bias."""


@lstm_layer.register_fake
def _(x: Any, h0: Any, c0: Any, w_ih: Any, w_hh: Any, bias: Any) -> tuple[Tensor, ...]:
    every = (x.shape[0], *h0.shape)
    gates = (*x.shape[:2], w_ih.shape[0])
    return x.new_empty(every), c0.new_empty(c0.shape), x.new_empty(every), x.new_empty(gates)


@lstm_layer_backward.register_fake
def _(
    grad_y: Any, grad_last_c: Any, x: Any, h0: Any, c0: Any, w_ih: Any, w_hh: Any, *rest: Any
) -> tuple[Tensor, ...]:
    by = (x, h0, c0, w_ih, w_hh, w_ih[:, 0])
    return tuple(value.new_empty(value.shape) for value in by)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad_y: Any, grad_last_c: Any, *_: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if grad_y is None:
        grad_y = torch.zeros_like(saved[6])
    gradients = lstm_layer_backward(grad_y, grad_last_c, *saved)
    needs = zip(gradients, ctx.needs_input_grad, strict=True)
    return tuple(gradient if needed else None for gradient, needed in needs)


lstm_layer.register_autograd(_backward, setup_context=_save)

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.hetpipe.lstm_layer.default: layer,
    torch.ops.hetpipe.lstm_layer_backward.default: layer_backward,
    torch.ops.hetpipe.lstm.default: unrolled_lstm,
    torch.ops.hetpipe.lstm_backward.default: unrolled_lstm_backward,
}
"""Decompositions; tracing decomposes the resulting operators further, down to core ATen."""
