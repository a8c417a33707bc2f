"""A layer of an LSTM, forward and backward: one launch runs the whole loop over time."""

from __future__ import annotations

import math

from torch import fx

from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.product import Operand
from ..lower.registry import lowers
from ._common import arguments, optional, why_not_float32
from .matmul import pack

LANES = 16
LARGEST_ROWS = 12
"""Most rows of the register tile in `kernels/cpu/lstm.cl`; a row has two accumulators."""
FEWEST_ROWS = 4
"""Least rows per work-item: with fewer, reading the weights would dominate."""


def _launch(
    builder: Builder, name: str, weight: Value, gates: int, hidden: int, batch: int,
    args: dict[str, Value | int],
) -> None:  # fmt: skip
    """Launch `name` over the rows of a batch; products of a step have depth `gates * hidden`."""
    items = min(builder.device.compute_units, math.ceil(batch / FEWEST_ROWS))
    share = math.ceil(batch / items)
    most, fewest = min(share, LARGEST_ROWS), min(share, FEWEST_ROWS)
    rows = min(range(most, fewest - 1, -1), key=lambda rows: -share % rows)  # fewest idle rows
    groups = math.ceil(share / rows)
    items = math.ceil(batch / (groups * rows))
    panel = builder.new(
        (items, 2, groups, gates, math.ceil(hidden / LANES), rows, LANES), "float32"
    )
    files = ("cpu/common.cl", "exp.cl", "cpu/lstm.cl")
    builder.launch(
        builder.device.kernel(name, files, f"ROWS={rows}"), (items,),
        {
            **args, "weight": weight, "panel": panel, "batch": batch, "hidden": hidden,
            "groups": groups,
        },
    )  # fmt: skip


@lowers("hetpipe.lstm.default", supports=why_not_float32, kept=True)
def lstm(builder: Builder, node: fx.Node) -> None:
    """Results: (y, c, gates)."""
    gates_x, h0, c0 = (builder.value(arg) for arg in arguments(node)[:3])
    weight, (row, col), offset = builder.strided(arguments(node)[3])
    steps, batch = gates_x.shape[:2]
    hidden = h0.shape[1]
    y, c, gates = results = tuple(builder.new(val.shape, "float32") for val in node.meta["val"])
    by_gate = Operand(weight, offset, hidden * row, col, row)
    packed = pack(builder, "right", by_gate, hidden, hidden, batch=4)
    _launch(
        builder, "lstm", packed, 1, hidden, batch,
        {"gates_x": gates_x, "h0": h0, "c0": c0, "y": y, "c": c, "gates": gates, "steps": steps},
    )  # fmt: skip
    builder.result(node, results)


@lowers("hetpipe.lstm_backward.default", supports=why_not_float32, kept=True)
def lstm_backward(builder: Builder, node: fx.Node) -> None:
    """Results: (grad_gates_x, grad_h0, grad_c0)."""
    grad_y_node, grad_last_c, *others, weight_node = arguments(node)
    grad_y = builder.value(grad_y_node)
    gates, c, c0 = (builder.value(arg) for arg in others)
    weight, (row, col), offset = builder.strided(weight_node)
    steps, batch, hidden = c.shape
    results = tuple(builder.new(val.shape, "float32") for val in node.meta["val"])
    operand = Operand(weight, offset, 0, row, col)
    packed = pack(builder, "right", operand, hidden, 4 * hidden)
    _launch(
        builder, "lstm_backward", packed, 4, hidden, batch,
        {
            "grad_y": grad_y, **optional(builder, "grad_last_c", grad_last_c, grad_y),
            "gates": gates, "c": c, "c0": c0, "grad_gates": results[0], "grad_h0": results[1],
            "grad_c0": results[2], "steps": steps,
        },
    )  # fmt: skip
    builder.result(node, results)
