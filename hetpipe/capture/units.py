"""Units of a graph: each operator's call with the items that are taken of its result, for those who
run a graph operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hetpipe.capture.slots import extract
from hetpipe.sdk.graph import canonical, graph_calls, graph_outputs, operator_name

Unit = list[fx.Node]


@dataclass(frozen=True)
class Part:
    """Nodes of a graph as a graph of their own, from the tensors `sources` to `results`."""

    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    graph: fx.GraphModule


def units_of(graph: fx.GraphModule) -> list[Unit]:
    """The units, in the graph's order."""
    unit_of: dict[fx.Node, Unit] = {}
    units: list[Unit] = []
    for node in graph_calls(graph):
        if operator_name(node) == "getitem":
            unit_of[node.all_input_nodes[0]].append(node)
        else:
            unit_of[node] = [node]
            units.append(unit_of[node])
    return units


def part_of(
    graph: fx.GraphModule,
    units: Sequence[Unit],
    returns: Callable[[fx.Node], bool] = lambda node: True,
) -> Part | None:
    """Some units as a graph that returns what others read, of the tensors that it may return; None
    if that is nothing."""
    nodes = [node for unit in units for node in unit]
    inside, outputs = set(nodes), set(graph_outputs(graph))
    reads = (source for node in nodes for source in node.all_input_nodes)
    sources = tuple(dict.fromkeys(source for source in reads if source not in inside))
    results = tuple(
        node
        for node in nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
        and (node in outputs or not set(node.users) <= inside)
        and returns(node)
    )
    if not results:
        return None
    return Part(tuple(nodes), sources, results, canonical(extract(graph.graph, sources, results)))
