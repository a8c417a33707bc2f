"""Operands of which only the shape is read: a backward must not have them saved for it."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten
SHAPE_ONLY = {aten.max_pool2d_with_indices_backward.default: 1}
"""The argument of these operators that is read for its shape alone."""


def forget_shapes(graph: fx.Graph) -> None:
    """Give these operators a number in the shape of the operand."""
    for node in list(graph.nodes):
        if (index := SHAPE_ONLY.get(node.target)) is None:
            continue
        value = node.args[index].meta["val"]
        with graph.inserting_before(node):
            zero = graph.call_function(aten.full.default, ((), 0.0), {"dtype": value.dtype})
            wide = graph.call_function(aten.expand.default, (zero, list(value.shape)))
        zero.meta.update(node.meta, val=value.new_empty(()))
        wide.meta.update(node.meta, val=value.new_empty(()).expand(value.shape))
        node.update_arg(index, wide)
