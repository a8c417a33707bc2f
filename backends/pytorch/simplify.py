"""Rewrites that make a graph cheaper for torch, before memory is assigned."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def simplify(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in (aten.view.default, aten._unsafe_view.default):
            # Strides may differ from the traced strides; if they allow no view, reshape copies.
            node.target = aten.reshape.default
        elif node.target is aten.as_strided.default:
            _straighten(graph, node)
        elif node.target is aten.fill.Tensor:
            _fill_with_scalar(graph, node)
        elif node.target is aten.t.default:
            _cancel_transposes(node)
        elif node.target is aten.sub.Tensor:
            _fuse_scaled_subtraction(node)
        elif node.target is aten.add.Tensor:
            _fuse_product_into_sum(node)
    graph.eliminate_dead_code()


def _straighten(graph: fx.Graph, node: fx.Node) -> None:
    """Make the operand of `as_strided` row-major, since its strides may differ from the trace's."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    with graph.inserting_before(node):
        straight = graph.call_function(aten.contiguous.default, (source,))
    straight.meta = dict(source.meta)
    node.replace_input_with(source, straight)


def _fill_with_scalar(graph: fx.Graph, node: fx.Node) -> None:
    """Make the value of a `fill` 0-d: torch rejects values with dimensions."""
    value = node.args[1]
    assert isinstance(value, fx.Node)
    if value.meta["val"].dim() > 0:
        with graph.inserting_before(node):
            scalar = graph.call_function(aten.reshape.default, (value, []))
        scalar.meta = {**value.meta, "val": value.meta["val"].reshape(())}
        node.args = (node.args[0], scalar)


def _cancel_transposes(node: fx.Node) -> None:
    """Replace `t(t(x))` with x: autograd transposes a weight back and forth."""
    inner = node.args[0]
    if isinstance(inner, fx.Node) and inner.target is aten.t.default:
        source = inner.args[0]
        assert isinstance(source, fx.Node)
        node.replace_all_uses_with(source)


def _fuse_scaled_subtraction(node: fx.Node) -> None:
    """Compute `p - a * b`, the last line of an optimizer's step, in one pass over memory."""
    base, product = _plain_operands(node)
    if (
        _only_use(product, aten.mul.Tensor)
        and all(_alike(base, factor) for factor in product.args)
        and len(product.args) == 2
    ):
        node.target = aten.addcmul.default
        node.args = (base, *product.args)
        node.kwargs = {"value": -1}


def _fuse_product_into_sum(node: fx.Node) -> None:
    """Compute `sum + a @ b` by one operator: a gradient goes directly into its accumulator."""
    base, product = _plain_operands(node)
    if _only_use(product, aten.mm.default) and _alike(base, product) and base.op == "placeholder":
        node.target = aten.addmm.default
        node.args = (base, *product.args)


def _plain_operands(node: fx.Node) -> tuple[Any, Any]:
    """Return both operands of a binary node, or two Nones if it has `alpha`."""
    if len(node.args) != 2 or node.kwargs:
        return None, None
    return node.args[0], node.args[1]


def _only_use(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is target and len(node.users) == 1


def _alike(base: Any, factor: Any) -> bool:
    """Return whether a factor has the base's floating dtype, and its shape or no dimensions."""
    if not isinstance(factor, fx.Node) or not isinstance(base, fx.Node):
        return False
    value, result = factor.meta["val"], base.meta["val"]
    shaped = value.shape == result.shape or value.dim() == 0
    return bool(shaped and value.dtype == result.dtype and value.is_floating_point())
