"""An operator that sums over the replicas of a stage.

Replicas divide the rows of a micro-batch, and its loss is the sum of their parts. For a single
replica, which has all rows, the operator is the identity. No backend gets the operator: the engine
divides a graph at it (`hetpipe.worker.divided`), or drops it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from hetpipe.sdk.operators.custom import operator


@operator("replica_sum")
def replica_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum x over all replicas of the stage, in their order: bit for bit the same on each."""
    return x.clone()


@replica_sum.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """Sum the gradient as well: every replica's part of the loss reads the sum."""
    summed: torch.Tensor = replica_sum(grad)
    return summed


replica_sum.register_autograd(_gradient)


def is_sum(node: fx.Node) -> bool:
    """Whether the node is a sum over replicas."""
    return node.target is torch.ops.hetpipe.replica_sum.default


def drop_sums(graph: fx.Graph, kept: Container[fx.Node] = ()) -> None:
    """Drop sums over replicas, which one replica does not need, except those in `kept`."""
    for node in [node for node in graph.nodes if is_sum(node) and node not in kept]:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
