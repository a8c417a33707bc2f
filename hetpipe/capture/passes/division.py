"""Divides a program at its sums over replicas, into segments and exchanges between them.

Independent sums share one exchange. A segment reads results of earlier segments, but recomputes
views, and values that depend on no sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from hetpipe.capture.passes.views import base_of, in_graph_order
from hetpipe.capture.program import CUT, GRAD, INPUT, SAVED, TANGENT, Program, Slot
from hetpipe.capture.slots import slot_of
from hetpipe.sdk.graph import canonical, graph_inputs, graph_outputs
from hetpipe.sdk.host.parts import dependents, extract
from hetpipe.sdk.operators.replicas import is_sum

_VARYING = (INPUT, CUT, SAVED, TANGENT, GRAD)


@dataclass(frozen=True)
class Segment:
    """A graph that runs between two exchanges. Tensors have the names of their nodes."""

    graph: fx.GraphModule | None
    """The graph; None if there is nothing to compute."""
    sources: tuple[str, ...]
    results: tuple[str, ...]
    last: frozenset[str]
    """The sources that no later segment, no exchange and no caller reads."""


@dataclass(frozen=True)
class Exchange:
    """Names of the terms that the replicas add up, and of the terms' sums."""

    terms: tuple[str, ...]
    sums: tuple[str, ...]


@dataclass(frozen=True)
class Division:
    """The segments of a program, with an exchange after each segment but the last."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[Segment, ...]
    exchanges: tuple[Exchange, ...]


def has_sums(program: Program) -> bool:
    """Return whether the program adds up values over the replicas of a stage."""
    return any(map(is_sum, program.graph.graph.nodes))


def layouts(program: Program) -> list[tuple[Slot, ...]]:
    """Return the terms of each exchange, as slots, in the order of the exchanges."""
    return [
        tuple(slot_of(("sum", str(index)), node) for index, node in enumerate(sums))
        for sums in _levels(program.graph.graph)[1]
    ]


def divide(program: Program) -> Division:
    """Divide a program at its sums over replicas."""
    graph = program.graph
    level, sums = _levels(graph.graph)
    exchanges = tuple(
        Exchange(
            tuple(node.all_input_nodes[0].name for node in nodes),
            tuple(node.name for node in nodes),
        )
        for nodes in sums
    )
    outputs = tuple(node.name for node in graph_outputs(graph))
    read = {*outputs, *(name for exchange in exchanges for name in exchange.terms)}
    parts: list[Segment] = []
    for sources, results in reversed(_boundaries(program, level, sums)):
        inner = canonical(extract(graph.graph, sources, results)) if results else None
        taken, left = (tuple(node.name for node in nodes) for nodes in (sources, results))
        parts.insert(0, Segment(inner, taken, left, frozenset(taken) - read))
        read.update(taken)
    inputs = tuple(node.name for node in graph_inputs(graph))
    return Division(inputs, outputs, tuple(parts), exchanges)


def _boundaries(
    program: Program, level: dict[fx.Node, int], sums: list[list[fx.Node]]
) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Return each segment's sources, and its results that are read or returned afterwards."""
    varying = _varying(program)
    results: list[set[fx.Node]] = [set() for _ in range(len(sums) + 1)]
    read = [*graph_outputs(program.graph), *(n.all_input_nodes[0] for group in sums for n in group)]
    for node in read:
        if node.op == "call_function" and not is_sum(node):
            results[level[node]].add(node)
    sources: list[set[fx.Node]] = [set() for _ in results]
    for number in reversed(range(len(results))):
        stack, seen = [*results[number]], set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder" or is_sum(node):
                sources[number].add(node)
            elif level[node] < number and node in varying and base_of(node) is node:
                sources[number].add(node)
                results[level[node]].add(node)
            else:
                stack += node.all_input_nodes
    pairs = zip(sources, results, strict=True)
    return [(in_graph_order(taken), in_graph_order(left)) for taken, left in pairs]


def _levels(graph: fx.Graph) -> tuple[dict[fx.Node, int], list[list[fx.Node]]]:
    """Return the number of exchanges before each node, and the sums of each exchange."""
    level: dict[fx.Node, int] = {}
    sums: list[list[fx.Node]] = []
    for node in graph.nodes:
        level[node] = max((level[n] + is_sum(n) for n in node.all_input_nodes), default=0)
        if is_sum(node):
            sums += [[] for _ in range(level[node] + 1 - len(sums))]
            sums[level[node]].append(node)
    return level, sums


def _varying(program: Program) -> set[fx.Node]:
    """Return the nodes whose value differs from one micro-batch to the next."""
    pairs = zip(graph_inputs(program.graph), program.inputs, strict=True)
    starts = [node for node, slot in pairs if slot.role in _VARYING]
    return dependents(program.graph.graph, [*starts, *filter(is_sum, program.graph.graph.nodes)])
