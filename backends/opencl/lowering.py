"""A graph becomes launches, with what the executable must know of inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.graph import graph_calls, graph_inputs, graph_outputs, operator_name

from .arena import inherits, lives, nbytes
from .builder import Builder, Launch
from .expr import Value
from .ops.registry import LOWERINGS
from .outside import Check, checks
from .target import Target


@dataclass(frozen=True)
class Output:
    """A result: placeholder number `source`, or the tensor `value`, as told to the caller.

    `heirs` lists placeholders whose memory it may take if they are donated.
    """

    value: Value | None
    source: int | None = None
    heirs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lowered:
    """A graph in launches."""

    inputs: tuple[Value, ...]
    outputs: tuple[Output, ...]
    results: tuple[int, ...]
    """Which of `outputs` each result of the graph is."""
    launches: tuple[Launch, ...]
    checks: tuple[Check, ...] = ()
    """Indices to look at when a run has ended."""


def lower(graph: fx.GraphModule, target: Target) -> Lowered:
    """Lower every node that a result needs, in order."""
    nodes = graph_outputs(graph)
    builder = Builder(target, frozenset(nodes))
    placeholders = graph_inputs(graph)
    inputs = [builder.input(node) for node in placeholders]
    calls = _order(graph)
    for node in calls:
        lowering = LOWERINGS.get(operator_name(node))
        if lowering is None:
            raise UnsupportedOperatorError(
                f"{target.info.id} has no kernel for {operator_name(node)}"
            )
        lowering.lower(builder, node)
    distinct = list(dict.fromkeys(nodes))
    taken = {value.id for value in inputs}
    outputs: list[Output] = []
    for node in distinct:
        if node.op == "placeholder":
            outputs.append(Output(None, placeholders.index(node)))
            continue
        # A caller may donate one result and keep the other: they never share memory.
        value = builder.value(node)
        if value.id in taken:
            value = builder.store_copy(builder.expr(node))
        taken.add(value.id)
        outputs.append(Output(value))
    checked = checks(builder, calls)
    results = [output.value for output in outputs if output.value is not None]
    launches = builder.finish([*results, *(check.value for check in checked)])
    return Lowered(
        tuple(inputs),
        _with_heirs(outputs, inputs, launches),
        tuple(distinct.index(node) for node in nodes),
        launches,
        checked,
    )


def _order(graph: fx.GraphModule) -> list[fx.Node]:
    """The operators that a result needs, elementwise results as soon as their inputs are there.

    Traced graphs have them at the end, where what they read has left the cache, and where no kernel
    that reads the same is left for them to join.
    """
    needed = _needed(graph)
    calls = [node for node in graph_calls(graph) if node in needed]
    outputs = set(graph_outputs(graph))
    early: set[fx.Node] = set()
    for node in reversed(calls):
        users = [user for user in node.users if user in needed]
        wanted = all(user in early for user in users) if users else node in outputs
        if wanted and _is_pointwise(node):
            early.add(node)
    place: dict[fx.Node, int] = dict.fromkeys(graph_inputs(graph), -1)
    for at, node in enumerate(calls):
        inputs = [place[other] for other in node.all_input_nodes]
        place[node] = max(inputs, default=-1) if node in early else at
    return sorted(calls, key=place.__getitem__)


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


def _with_heirs(
    outputs: Sequence[Output], inputs: Sequence[Value], launches: Sequence[Launch]
) -> tuple[Output, ...]:
    life = lives(launches)
    returned = {output.source for output in outputs}
    found = []
    for output in outputs:
        heirs: list[int] = []
        if output.value is not None and output.value.id in life:
            mine = life[output.value.id]
            for index, value in enumerate(inputs):
                if index in returned or nbytes(value) != mine.nbytes:
                    continue
                if value.id not in life or inherits(life[value.id], mine, value.id, launches):
                    heirs.append(index)
            # First those that it is computed from: they are in the cache.
            first = launches[mine.first].inplace
            heirs.sort(key=lambda index: inputs[index].id not in first)
        found.append(Output(output.value, output.source, tuple(heirs)))
    return tuple(found)
