"""Finds views: all or some elements of another tensor, in another shape or a wider dtype."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable

import torch
from torch import fx

from hetpipe.capture.slots import is_tensor, node_nbytes, widens

aten = torch.ops.aten
_VIEWS = frozenset(
    {
        aten.t.default,
        aten.permute.default,
        aten.transpose.int,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        operator.getitem,
    }
)


def base_of(node: fx.Node, inputs: Container[fx.Node] = ()) -> fx.Node:
    """Return the tensor at the start of a chain of views; one of `inputs` ends the chain."""
    base = node
    while base not in inputs and (base.target in _VIEWS or widens(base)):
        source = base.all_input_nodes[0]
        if not is_tensor(source) and source.target not in _VIEWS:
            break  # one result of an operator with several results
        base = source
    return base


def saves_nothing(view: fx.Node, base: fx.Node) -> bool:
    """Return whether the view is at least as large as its base."""
    return node_nbytes(view) >= node_nbytes(base)


def keep_bases(nodes: Iterable[fx.Node], inputs: Container[fx.Node]) -> list[fx.Node]:
    """Return the nodes to keep for `nodes`: bases instead of their views, unless views are smaller.

    `inputs` exist in any case, so their views are never kept. The result is in graph order.
    """
    kept: dict[fx.Node, None] = {}
    shrunk: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        base = base_of(node, inputs)
        if base is node or not is_tensor(node) or saves_nothing(node, base):
            kept[base] = None
        else:
            shrunk.setdefault(base, []).append(node)
    for base, parts in shrunk.items():
        if base in kept or base in inputs or sum(map(node_nbytes, parts)) >= node_nbytes(base):
            kept[base] = None
        else:
            kept.update(dict.fromkeys(parts))
    return in_graph_order(kept)


def in_graph_order(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Return the nodes, all from one graph, in its order."""
    listed = list(nodes)
    if not listed:
        return []
    order = {node: index for index, node in enumerate(listed[0].graph.nodes)}
    return sorted(listed, key=order.__getitem__)
