"""Applies the masks of rectifiers early, and saves no mask that the backward can compute."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from hetpipe.capture.passes.views import in_graph_order

aten = torch.ops.aten
_COMPARISONS = frozenset(
    getattr(aten, name).Scalar for name in ("eq", "ne", "lt", "le", "gt", "ge")
)
_POOL_BACKWARD = aten.max_pool2d_with_indices_backward.default


def drop_comparisons(saved: list[fx.Node], inputs: Collection[fx.Node]) -> list[fx.Node]:
    """In `saved`, replace a comparison by its operand, if the backward gets the operand anyway.

    The backward compares again, which costs no more than reading a saved mask.
    """
    there = {*saved, *inputs}
    return in_graph_order(
        dict.fromkeys(
            node.all_input_nodes[0]
            if node.target in _COMPARISONS and node.all_input_nodes[0] in there
            else node
            for node in saved
        )
    )


class _Mask(NamedTuple):
    """A gradient that is zero wherever `result`, the output of a rectifier, is not positive."""

    gradient: Any
    result: Any


def mask_pooled(graph: fx.Graph) -> None:
    """Mask a max pooling's gradients before they are spread over its input, a rectifier's output.

    A maximum equals the element that gets its gradient, and all other elements get no gradient, so
    the result is the same. The mask has the size of the maxima, which are fewer than the pixels,
    and the backward does not need the pooling's input.
    """
    for spread in graph.find_nodes(op="call_function", target=_POOL_BACKWARD):
        pool: Any = spread.args[7].args[0]
        readers = list(spread.users)
        mask = _mask_of(readers[0]) if len(readers) == 1 else None
        if mask is None or mask.gradient is not spread or mask.result is not pool.args[0]:
            continue
        with graph.inserting_before(spread):
            masked = _mask_gradient(graph, readers[0], spread.args[0], _maxima(graph, pool))
        spread.update_arg(0, masked)
        readers[0].replace_all_uses_with(spread)
    graph.eliminate_dead_code()


def _mask_of(node: fx.Node) -> _Mask | None:
    """Return the mask that a node applies, as one operator or as its decomposition."""
    args: Any = node.args
    if node.target is aten.threshold_backward.default and args[2] == 0:
        return _Mask(*args[:2])
    if node.target is aten.where.self:
        where, zero, gradient = args
        is_zero = zero.target is aten.scalar_tensor.default and zero.args[0] == 0
        if is_zero and where.target is aten.le.Scalar and where.args[1] == 0:
            return _Mask(gradient, where.args[0])
    return None


def _maxima(graph: fx.Graph, pool: fx.Node) -> fx.Node:
    """Return the first result of a pooling."""
    for result in pool.users:
        if result.args[1] == 0:
            return result
    with graph.inserting_after(pool):
        result = graph.call_function(operator.getitem, (pool, 0))
    result.meta.update(pool.meta, val=pool.meta["val"][0])
    return result


def _mask_gradient(graph: fx.Graph, mask: fx.Node, gradient: Any, result: fx.Node) -> fx.Node:
    """Apply the operator of `mask` to another gradient and another result of a rectifier."""
    value, target = gradient.meta["val"], cast("Callable[..., Any]", mask.target)
    if mask.target is aten.threshold_backward.default:
        masked = graph.call_function(target, (gradient, result, 0))
    else:
        where = graph.call_function(aten.le.Scalar, (result, 0))
        where.meta.update(mask.meta, val=torch.empty_like(value, dtype=torch.bool))
        zero = graph.node_copy(mask.all_input_nodes[1])
        masked = graph.call_function(target, (where, zero, gradient))
    masked.meta.update(mask.meta, val=value)
    return masked
