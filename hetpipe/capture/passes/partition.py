"""Divides a joint graph into a forward and a backward, which may use different weights.

A tensor that depends on no sample is never saved: it depends only on parameters, constants,
unchanging buffers or the random counter. The backward recomputes it from its own arguments, and so
works with any version of the weights.
"""

from __future__ import annotations

import torch
from torch import fx

from hetpipe.capture.passes.backward_halves import halve
from hetpipe.capture.passes.joint_graph import Joint
from hetpipe.capture.passes.mincut import minimum_cut
from hetpipe.capture.passes.recompute import INPUTS, MIN_CUT, NONE
from hetpipe.capture.passes.relu_masks import drop_comparisons
from hetpipe.capture.passes.running_statistics import drop_unread, drop_updates, sources
from hetpipe.capture.passes.views import in_graph_order, keep_bases
from hetpipe.capture.program import BUFFER, CUT, GRAD, INPUT, SAVED, TANGENT, PassPrograms
from hetpipe.capture.slots import (
    BACKWARD_ORDER,
    FORWARD_ORDER,
    Key,
    make_program,
    placeholders,
    sort_by_role,
)
from hetpipe.sdk.operators.replicas import is_sum

aten = torch.ops.aten
_SHAPE_ONLY = {aten.max_pool2d_with_indices_backward.default: 1}
"""For these operators, the index of an argument that is read for its shape alone."""


def partition(
    joint: Joint, samples: int, recompute: str = NONE, halves: bool = False
) -> PassPrograms:
    """Return the forward and backward of a joint graph for micro-batches of `samples`.

    `recompute` is one of `recompute.MODES`. With `halves` the backward also comes in two halves.
    The joint graph is changed and cannot be used again.
    """
    drop_unread(joint.graph)
    _forget_shapes(joint.graph)
    saved = _tensors_to_save(joint, recompute) if joint.gradients else []
    stage_inputs = {node: key for node, key in joint.inputs.items() if key[0] in (INPUT, CUT)}
    kept = [((SAVED, node.name), node) for node in saved if node not in stage_inputs]
    inputs = [(key, node) for node, key in joint.inputs.items() if key[0] != TANGENT]
    forward = make_program(
        joint.graph, sort_by_role(inputs, FORWARD_ORDER), [*joint.outputs, *kept]
    )
    if not joint.gradients:
        return PassPrograms(samples, forward, None)
    drop_updates(joint.graph)
    accumulators, results = _accumulate(joint)
    arguments = [
        *((key, node) for node, key in joint.inputs.items() if not _is_sample(joint, key)),
        *((stage_inputs[node], node) for node in saved if node in stage_inputs),
        *kept,
        *accumulators,
    ]
    arguments = sort_by_role(arguments, BACKWARD_ORDER)
    backward = make_program(joint.graph, arguments, results)
    divided = halve(joint.graph, arguments, results) if halves else None
    return PassPrograms(samples, forward, backward, divided)


def _is_sample(joint: Joint, key: Key) -> bool:
    """Return whether the input differs between the micro-batches of a step."""
    updated = {name for (role, name), _ in joint.outputs if role == BUFFER}
    return key[0] in (INPUT, CUT) or (key[0] == BUFFER and key[1] in updated)


def _dependents(joint: Joint, starts: set[fx.Node]) -> set[fx.Node]:
    """Return all nodes that depend on one of `starts`, these included."""
    dependent = set(starts)
    for node in joint.graph.nodes:
        if node.op == "call_function" and any(n in dependent for n in node.all_input_nodes):
            dependent.add(node)
    return dependent


def _tensors_to_save(joint: Joint, recompute: str) -> list[fx.Node]:
    """Return the sample-dependent tensors that the forward keeps for the backward."""
    samples = {node for node, key in joint.inputs.items() if _is_sample(joint, key)}
    dependent = _dependents(joint, samples)
    tangents = {node for node, key in joint.inputs.items() if key[0] == TANGENT}
    read = _backward_reads(joint, _dependents(joint, tangents), dependent)
    if recompute == INPUTS:
        return _origins(samples, read)
    if recompute == MIN_CUT:
        return minimum_cut(samples, read, dependent)
    return drop_comparisons(keep_bases(read, joint.inputs), joint.inputs)


def _backward_reads(joint: Joint, backward: set[fx.Node], dependent: set[fx.Node]) -> list[fx.Node]:
    """Return the sample-dependent forward tensors that the backward and its recomputation read."""
    stack: list[fx.Node] = [node for _, node in joint.gradients]
    seen: set[fx.Node] = set()
    read: list[fx.Node] = []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in dependent and node not in backward:
            read.append(node)
        else:
            stack.extend(node.all_input_nodes)
    return read


def _origins(samples: set[fx.Node], nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the sample-dependent inputs and sums over replicas from which `nodes` are computed."""
    origins, seen, stack = set[fx.Node](), set[fx.Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in samples or is_sum(node):
            origins.add(node)
        else:
            stack += sources(node)
    return in_graph_order(origins)


def _accumulate(
    joint: Joint,
) -> tuple[list[tuple[Key, fx.Node]], list[tuple[Key, fx.Node]]]:
    """Add each parameter's gradient to its accumulator at once. Return (accumulators, results).

    Results are the TANGENTs, then the GRADs.
    """
    tangents: list[tuple[Key, fx.Node]] = []
    sums: list[tuple[Key, fx.Node]] = []
    accumulators: list[tuple[Key, fx.Node]] = []
    graph = joint.graph
    first = next(iter(graph.nodes))
    for (role, name), gradient in joint.gradients:
        if role == CUT:
            tangents.append(((TANGENT, name), gradient))
            continue
        with graph.inserting_before(first):
            accumulator = graph.placeholder("grad")
        accumulator.meta["val"] = gradient.meta["val"]
        spot = gradient if gradient.op != "placeholder" else placeholders(graph)[-1]
        with graph.inserting_after(spot):
            total = graph.call_function(aten.add.Tensor, (accumulator, gradient))
        total.meta.update(gradient.meta)
        accumulators.append(((GRAD, name), accumulator))
        sums.append(((GRAD, name), total))
    return accumulators, [*tangents, *sums]


def _forget_shapes(graph: fx.Graph) -> None:
    """Replace operands that are read for their shape alone by a number in that shape.

    A backward then needs no saved tensor for them.
    """
    for node in list(graph.nodes):
        if (index := _SHAPE_ONLY.get(node.target)) is None:
            continue
        value = node.args[index].meta["val"]
        with graph.inserting_before(node):
            zero = graph.call_function(aten.full.default, ((), 0.0), {"dtype": value.dtype})
            wide = graph.call_function(aten.expand.default, (zero, list(value.shape)))
        zero.meta.update(node.meta, val=value.new_empty(()))
        wide.meta.update(node.meta, val=value.new_empty(()).expand(value.shape))
        node.update_arg(index, wide)
