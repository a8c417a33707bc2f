"""Divides a backward into two programs, so that the previous stage waits only for the first.

The programs are B and W of Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hetpipe.capture.passes.views import in_graph_order, keep_bases
from hetpipe.capture.program import CUT, GRAD, INPUT, SAVED, TANGENT, Program
from hetpipe.capture.slots import BACKWARD_ORDER, Key, is_tensor, make_program, sort_by_role
from hetpipe.sdk.host.parts import reachable

aten = torch.ops.aten
Pairs = Sequence[tuple[Key, fx.Node]]


def halve(graph: fx.Graph, arguments: Pairs, results: Pairs) -> tuple[Program, Program]:
    """Return the input half and the weight half of a backward; see `PassPrograms.halves`.

    The input half computes the outgoing TANGENTs, the weight half everything else. An operator that
    yields both kinds of gradient stays in the input half; a convolution becomes two calls.
    """
    tangents = [(key, node) for key, node in results if key[0] == TANGENT]
    sums = [(key, node) for key, node in results if key[0] == GRAD]
    outgoing = {key for key, _ in tangents}
    inputs = {node for _, node in arguments}
    replaced = {node for key, node in arguments if key in outgoing}  # by a TANGENT of that name
    first = _tangent_calls([node for _, node in tangents], inputs) | replaced
    read = _weight_half_reads(graph, arguments, [node for _, node in sums], first)
    kept = inputs - replaced
    saved = [((SAVED, n.name), n) for n in keep_bases(read, inputs) if n not in kept]
    before = [(key, node) for key, node in arguments if key[0] != GRAD]
    after = [*((key, node) for key, node in arguments if node in kept), *saved]
    return (
        make_program(graph, before, [*tangents, *saved]),
        make_program(graph, sort_by_role(after, BACKWARD_ORDER), sums),
    )


def _tangent_calls(tangents: list[fx.Node], inputs: set[fx.Node]) -> set[fx.Node]:
    """Return the calls that compute the tangents, after dividing convolutions among them in two."""
    for node in in_graph_order(reachable(tangents, inputs) - inputs):
        if node.target is aten.convolution_backward.default:
            _divide(node)
    calls = {node for node in reachable(tangents, inputs) - inputs if node.op == "call_function"}
    return calls | {user for node in calls if not is_tensor(node) for user in node.users}


def _divide(node: fx.Node) -> None:
    """Divide a convolution's backward: one call for the input, one for weight and bias if read."""
    args: Any = node.args
    *operands, mask = args
    values = node.meta["val"]
    if not any(mask[1:]):
        return
    with node.graph.inserting_after(node):
        weights = node.graph.call_function(
            aten.convolution_backward.default, (*operands, [False, *mask[1:]])
        )
    weights.meta = {**node.meta, "val": (None, *values[1:])}
    node.args = (*operands, [True, False, False])
    node.meta["val"] = (values[0], None, None)
    for user in list(node.users):
        if user.args[1] != 0:
            user.args = (weights, user.args[1])


def _weight_half_reads(
    graph: fx.Graph, arguments: Pairs, sums: list[fx.Node], first: set[fx.Node]
) -> list[fx.Node]:
    """Return the nodes of `first` that the weight half reads and that depend on the micro-batch.

    The weight half recomputes nodes that depend on parameters alone.
    """
    inputs = {node for _, node in arguments}
    varying = {node for (role, _), node in arguments if role in (INPUT, CUT, SAVED, TANGENT)}
    for node in graph.nodes:
        if node not in inputs and any(source in varying for source in node.all_input_nodes):
            varying.add(node)
    read: list[fx.Node] = []
    seen, stack = set[fx.Node](), list(sums)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in first and node in varying:
            read.append(node)
        elif node not in inputs:
            stack.extend(node.all_input_nodes)
    return read
