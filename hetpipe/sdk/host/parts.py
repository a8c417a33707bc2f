"""Parts of a graph: separate graphs of some of its nodes, or of single operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hetpipe.sdk.graph import canonical, graph_calls, graph_outputs, operator_name

Unit = list[fx.Node]
"""An operator's call, with the `getitem` nodes that read its results."""


@dataclass(frozen=True)
class Part:
    """Nodes of a graph as a separate graph, which computes `results` from `sources`."""

    nodes: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    graph: fx.GraphModule


def reachable(
    outputs: Iterable[fx.Node],
    inputs: Iterable[fx.Node],
    sources: Callable[[fx.Node], Iterable[fx.Node]] = lambda node: node.all_input_nodes,
) -> set[fx.Node]:
    """Return the nodes that compute `outputs`, down to `inputs` (included if reached).

    `sources` returns the operands of a node.
    """
    stop, reached, stack = set(inputs), set[fx.Node](), list(outputs)
    while stack:
        node = stack.pop()
        if node in reached:
            continue
        reached.add(node)
        if node not in stop:
            stack.extend(sources(node))
    return reached


def dependents(graph: fx.Graph, starts: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on one of `starts`, including `starts`."""
    dependent = set(starts)
    for node in graph.nodes:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
    return dependent


def extract(source: fx.Graph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> fx.Graph:
    """Return a graph that computes `outputs` from `inputs` (any nodes of `source`), with `meta`."""
    needed = reachable(outputs, inputs)
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in source.nodes:
        if node in needed and node not in env:
            if node.op == "placeholder":
                raise AssertionError(f"{node} is needed but is not an input")
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in outputs))
    return graph


def units_of(graph: fx.GraphModule) -> list[Unit]:
    """Return the units of a graph in order."""
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
    """Return some units as a graph; None if the graph would return nothing.

    The graph returns the tensors that other units or the output read, if `returns` allows them.
    """
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
