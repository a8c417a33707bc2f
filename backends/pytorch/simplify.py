"""Rewrites that make a graph cheaper for torch, before memory is assigned."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def simplify(graph: fx.Graph) -> None:
    """Apply all rewrites to a functional graph."""
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            # Strides here may differ from those of tracing: where a view is none, copy.
            node.target = aten.reshape.default
        elif node.target is aten.sub.Tensor:
            _fuse_scaled_subtraction(node)
    graph.eliminate_dead_code()


def _fuse_scaled_subtraction(node: fx.Node) -> None:
    """`p - a * b` in one pass, as the step of an optimizer is written."""
    if len(node.args) != 2 or node.kwargs:
        return
    base, product = node.args
    if (
        isinstance(base, fx.Node)
        and isinstance(product, fx.Node)
        and product.target is aten.mul.Tensor
        and len(product.users) == 1
        and all(_alike(base, factor) for factor in product.args)
    ):
        node.target = aten.addcmul.default
        node.args = (base, *product.args)
        node.kwargs = {"value": -1}


def _alike(base: fx.Node, factor: Any) -> bool:
    """Whether a factor is of the base's dtype, floating, and of its shape or 0-d."""
    if not isinstance(factor, fx.Node):
        return False
    value, result = factor.meta["val"], base.meta["val"]
    shaped = value.shape == result.shape or value.dim() == 0
    return bool(shaped and value.dtype == result.dtype and value.is_floating_point())
