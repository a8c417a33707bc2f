"""Handles batch norm's running statistics: a forward updates them once, no gradient reads them."""

from __future__ import annotations

import torch
from torch import fx

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
