"""Chooses the cheapest tensors to keep for a backward, by a minimum cut in the forward's graph.

Every tensor is an edge whose capacity is its bytes. Edges lead from the source to stage inputs and
costly operators, and from the tensors that the backward reads to the sink. The backward gets the
tensors of a minimum cut, and computes from them all nodes between cut and sink. torch's own
`min_cut_rematerialization_partition` works in the same way.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from hetpipe.capture.passes.views import base_of, in_graph_order, saves_nothing
from hetpipe.capture.slots import is_tensor, node_nbytes

aten = torch.ops.aten
_UPDATING = aten._native_batch_norm_legit_functional.default


def _updates(node: fx.Node) -> bool:
    return node.target is _UPDATING and node.args[5] is True


def drop_unread(graph: fx.Graph) -> None:
    """Drop the running statistics from backwards in training, which do not use their values."""
    for node in graph.nodes:
        if node.target is aten.native_batch_norm_backward.default and node.args[7] is True:
            args = list(node.args)
            args[3] = args[4] = None
            node.args = tuple(args)


def sources(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a node's results need; new running statistics do not count."""
    unread = node.args[3:5] if _updates(node) else ()
    return [source for source in node.all_input_nodes if source not in unread]


def drop_updates(graph: fx.Graph) -> None:
    """Drop the update of statistics from norms, for graphs that repeat a forward."""
    for node in graph.nodes:
        if _updates(node):
            node.target = aten._native_batch_norm_legit.no_stats
            node.args = (*node.args[:3], *node.args[5:])
            node.meta["val"] = node.meta["val"][:3]


own = torch.ops.hetpipe
COSTLY = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mv.default,
        aten.addmv.default,
        aten.dot.default,
        aten.convolution.default,
        own.attention.default,
        own.lstm.default,
        own.lstm_layer.default,
        own.replica_sum.default,
    }
)
"""Operators that a minimum cut does not repeat."""


def minimum_cut(
    inputs: Collection[fx.Node], needed: Collection[fx.Node], dependent: Collection[fx.Node]
) -> list[fx.Node]:
    """Return the nodes with the fewest bytes from which all of `needed` can be computed again.

    `dependent` are the sample-dependent `inputs` and all nodes computed from them; other nodes cost
    nothing. Among several minimum cuts it chooses the one nearest to `needed`.
    """
    import networkx as nx  # type: ignore[import-untyped]

    network: Any = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    seen, stack = set[fx.Node](), list(needed)
    network.add_edges_from(((node, "out"), "sink") for node in needed)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        network.add_edge((node, "in"), (node, "out"), **_capacity(node))
        if node in inputs or node.target in COSTLY:
            network.add_edge("source", (node, "in"))
        read = [source for source in sources(node) if source in dependent]
        network.add_edges_from(((source, "out"), (node, "in")) for source in read)
        stack += read
    _, (_, behind) = nx.minimum_cut(network, "source", "sink")
    return in_graph_order(n for n in seen if (n, "in") not in behind and (n, "out") in behind)


def _capacity(node: fx.Node) -> dict[str, int]:
    """Return the tensor's bytes; none for tuples and full-size views, which are never cut."""
    if not is_tensor(node):
        return {}
    base = base_of(node)
    if base is not node and saves_nothing(node, base):
        return {}
    return {"capacity": node_nbytes(node)}
