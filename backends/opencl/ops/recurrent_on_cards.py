"""A layer of an LSTM on graphics cards, forward and backward: each time step is a launch.

The products of a step need all work-groups of a card, which can only wait for each other between
launches.
"""

from __future__ import annotations

import math

from torch import fx

from ..gpu.tiles import loads_of, product_parts, tiled_product, tiles_of
from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.launch import Kernel
from ..lower.product import Operand, Product
from ..lower.registry import lowers_on_cards
from ..lower.signature import Argument
from ._common import arguments, optional

GATES = 4
WIDTH = 256
"""Work-items of a work-group of `lstm_gradients`."""


@lowers_on_cards("hetpipe.lstm.default")
def lstm(builder: Builder, node: fx.Node) -> None:
    """Results: (y, c, gates)."""
    gates_x, h0, c0 = (builder.value(arg) for arg in arguments(node)[:3])
    weight = _weight(builder, arguments(node)[3])
    (steps, batch), hidden = gates_x.shape[:2], h0.shape[1]
    y, c, gates = results = tuple(builder.new(val.shape, "float32") for val in node.meta["val"])
    tiles = tiles_of(builder.device, (batch, GATES * hidden, hidden), 1, divides=False)
    kernel = Kernel.of_files(
        "lstm", ("gpu/tile.cl", "exp.cl", "gpu/lstm.cl"), *tiles.macros(builder.device),
        *loads_of("A", Operand(h0, 0, 0, hidden, 1), batch, hidden),
        *loads_of("B", weight, 1, hidden),  # neighbouring columns are different gates
    )  # fmt: skip
    for step in range(steps):
        builder.launch(
            kernel, tiles.global_size[:2],
            {
                "gates_x": gates_x, "h0": h0, "c0": c0, "weight": weight.value,
                "offset": weight.offset, "w_row": weight.row, "w_col": weight.col, "y": y, "c": c,
                "gates": gates, "step": step, "batch": batch, "hidden": hidden,
            },
            (tiles.group, tiles.group),
        )  # fmt: skip
    builder.result(node, results)


@lowers_on_cards("hetpipe.lstm_backward.default")
def lstm_backward(builder: Builder, node: fx.Node) -> None:
    """Results: (grad_gates_x, grad_h0, grad_c0).

    A step's product is the gradient of the h before the step; the last product is grad_h0.
    """
    grad_y_node, grad_last_c, *others, weight_node = arguments(node)
    grad_y = builder.value(grad_y_node)
    gates, c, c0 = (builder.value(arg) for arg in others)
    weight = _weight(builder, weight_node)
    steps, batch, hidden = c.shape
    grad_gates, grad_c0 = builder.new(gates.shape, "float32"), builder.new(c0.shape, "float32")
    args: dict[str, Argument] = {
        "grad_y": grad_y, **optional(builder, "grad_last_c", grad_last_c, grad_y), "gates": gates,
        "c": c, "c0": c0, "grad_gates": grad_gates, "grad_c0": grad_c0, "steps": steps,
        "batch": batch, "hidden": hidden,
    }  # fmt: skip
    kernel = Kernel.of_files("lstm_gradients", ["gpu/lstm_gradients.cl"])
    width = min(WIDTH, builder.device.max_work_group_size)

    def product(step: int) -> Product:
        depth = GATES * hidden
        left = Operand(grad_gates, step * batch * depth, 0, depth, 1)
        return Product(1, batch, hidden, depth, left, weight)

    grad_h: Value | None = None
    for step in reversed(range(steps)):
        if step < steps - 1:
            grad_h = product_parts(builder, product(step + 1))
        count = grad_h.shape[0] if grad_h else 0
        parts: dict[str, Argument] = {"grad_h": grad_h or grad_c0, "parts": count}
        size = (math.ceil(batch * hidden / width) * width,)
        builder.launch(kernel, size, {**args, **parts, "step": step}, (width,))
    grad_h0 = builder.reshape(tiled_product(builder, product(0)), c0.shape)
    builder.result(node, (grad_gates, grad_h0, grad_c0))


def _weight(builder: Builder, node: fx.Node) -> Operand:
    """Return w_hh as an operand, without a copy."""
    value, (row, col), offset = builder.strided(node)
    return Operand(value, offset, 0, row, col)
