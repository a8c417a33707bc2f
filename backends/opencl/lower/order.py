"""Order in which a graph's operators are lowered."""

from __future__ import annotations

import torch
from torch import fx

from hetpipe.sdk.graph import graph_calls, graph_inputs, graph_outputs, operator_name

MOVED = frozenset(
    {
        "aten._to_copy", "aten.view", "aten._unsafe_view", "aten.reshape", "aten.permute",
        "aten.t", "aten.transpose", "aten.expand", "aten.unsqueeze", "aten.squeeze", "aten.slice",
        "aten.select", "hetpipe.keep_mask", "hetpipe.uniform",
    }
)  # fmt: skip
"""Operators that, like elementwise operators, move to their first reader."""


def order(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the operators that the results need, in the order of lowering.

    If only results depend on an elementwise operator, it directly follows its operands. Traced
    graphs have such operators at the end, where their operands have left the cache and no other
    kernel with the same operands can compute them. Traced graphs begin with all recomputed masks
    and copies of inputs: these move directly before their first reader, and take no memory before.
    """
    needed = _needed(graph)
    calls = [node for node in graph_calls(graph) if node in needed]
    outputs = set(graph_outputs(graph))
    users = {node: [user for user in node.users if user in needed] for node in calls}
    early: set[fx.Node] = set()
    for node in reversed(calls):
        is_early = all(user in early for user in users[node]) if users[node] else node in outputs
        if is_early and _is_pointwise(node):
            early.add(node)
    late = _late(graph)
    place: dict[fx.Node, float] = dict.fromkeys(graph_inputs(graph), -1)
    first: dict[fx.Node, float] = {}
    for at, node in reversed(list(enumerate(calls))):
        first[node] = at
        if node in late and users[node] and not early.intersection(users[node]):
            first[node] = min(first[user] - (user not in late) / 2 for user in users[node])
    for node in calls:
        inputs = [place[other] for other in node.all_input_nodes]
        place[node] = max(inputs, default=-1) if node in early else first[node]
    return sorted(calls, key=place.__getitem__)


def _late(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the inputs, with elementwise operators, views and masks that need nothing else."""
    late = set(graph_inputs(graph))
    for node in graph_calls(graph):
        name = operator_name(node).rpartition(".")[0]
        if (_is_pointwise(node) or name in MOVED) and late.issuperset(node.all_input_nodes):
            late.add(node)
    return late


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _needed(graph: fx.GraphModule) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    stack = graph_outputs(graph)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return needed
