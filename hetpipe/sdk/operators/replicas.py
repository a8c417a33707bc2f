"""An operator that sums over the replicas of a stage.

Replicas divide the rows of a micro-batch; the loss of the micro-batch is the sum of the replicas'
parts. For a single replica, which has all rows, the operator is the identity. No backend gets the
operator: a worker divides a graph at the operator (`hetpipe.worker.divided`), or drops it.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import fx

from hetpipe.sdk.operators.custom import operator


@operator("replica_sum")
def replica_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum x over all replicas of the stage, in their order, so that all get the same bits."""
    return x.clone()


@replica_sum.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """Sum the gradient as well, because every replica's part of the loss reads the sum."""
    summed: torch.Tensor = replica_sum(grad)
    return summed


replica_sum.register_autograd(_gradient)


def is_sum(node: fx.Node) -> bool:
    return node.target is torch.ops.hetpipe.replica_sum.default


def drop_sums(graph: fx.Graph, kept: Container[fx.Node] = ()) -> None:
    """Drop the sums over replicas that are not in `kept`: a single replica needs no sum."""
    for node in [node for node in graph.nodes if is_sum(node) and node not in kept]:
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
