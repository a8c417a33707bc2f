"""Divide a joint graph into a forward and a backward program that may see other weights.

What depends on parameters, constants, unchanging buffers or the random counter alone is never
saved: the backward computes it again from its own arguments, so it takes any weight version.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from hetpipe.capture.joint import Joint
from hetpipe.capture.program import (
    BUFFER,
    CONSTANT,
    CUT,
    GRAD,
    INPUT,
    PARAM,
    RNG,
    SAVED,
    TANGENT,
    PassPrograms,
)
from hetpipe.capture.slots import Key, is_tensor, make_program, node_nbytes, placeholders

aten = torch.ops.aten
_FORWARD_ORDER = (PARAM, BUFFER, CONSTANT, INPUT, CUT, RNG)
_BACKWARD_ORDER = (PARAM, BUFFER, CONSTANT, RNG, INPUT, CUT, SAVED, TANGENT, GRAD)
_VIEWS = frozenset(
    {
        aten.t.default,
        aten.permute.default,
        aten.transpose.int,
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        operator.getitem,
    }
)


def partition(joint: Joint, samples: int) -> PassPrograms:
    """The forward and backward of a joint graph for micro-batches of `samples`."""
    _drop_unread_statistics(joint)
    backward = _after(joint, TANGENT)
    saved = _saved(joint, backward) if joint.gradients else []
    own = {node: key for node, key in joint.inputs.items() if key[0] in (INPUT, CUT)}
    kept = [((SAVED, node.name), node) for node in saved if node not in own]
    inputs = [(key, node) for node, key in joint.inputs.items() if key[0] != TANGENT]
    forward = make_program(joint.graph, _ordered(inputs, _FORWARD_ORDER), [*joint.outputs, *kept])
    if not joint.gradients:
        return PassPrograms(samples, forward, None)
    accumulators, results = _accumulate(joint)
    arguments = [
        *((key, node) for node, key in joint.inputs.items() if not _is_sample(joint, key)),
        *((own[node], node) for node in saved if node in own),
        *kept,
        *accumulators,
    ]
    program = make_program(joint.graph, _ordered(arguments, _BACKWARD_ORDER), results)
    return PassPrograms(samples, forward, program)


def _ordered(pairs: list[tuple[Key, fx.Node]], order: tuple[str, ...]) -> list[tuple[Key, fx.Node]]:
    return sorted(pairs, key=lambda pair: order.index(pair[0][0]))


def _is_sample(joint: Joint, key: Key) -> bool:
    """Whether the input differs between the micro-batches of one step."""
    updated = {name for (role, name), _ in joint.outputs if role == BUFFER}
    return key[0] in (INPUT, CUT) or (key[0] == BUFFER and key[1] in updated)


def _after(joint: Joint, *roles: str) -> set[fx.Node]:
    """All nodes that depend on an input of those roles, inputs included."""
    found = {node for node, key in joint.inputs.items() if key[0] in roles}
    for node in joint.graph.nodes:
        if node.op == "call_function" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _saved(joint: Joint, backward: set[fx.Node]) -> list[fx.Node]:
    """What the forward keeps: tensors that depend on the samples, bases rather than their views."""
    dependent = {node for node, key in joint.inputs.items() if _is_sample(joint, key)}
    for node in joint.graph.nodes:
        if node.op == "call_function" and any(n in dependent for n in node.all_input_nodes):
            dependent.add(node)
    edge = _wanted(joint, backward, dependent)
    saved: dict[fx.Node, None] = {}
    shrunk: dict[fx.Node, list[fx.Node]] = {}
    for node in edge:
        base = _base(node)
        if base is node or not is_tensor(node) or _covers(node, base):
            saved[base] = None
        else:
            shrunk.setdefault(base, []).append(node)
    for base, parts in shrunk.items():
        if base in saved or base in joint.inputs or _nbytes(parts) >= node_nbytes(base):
            saved[base] = None
        else:
            saved.update(dict.fromkeys(parts))
    order = {node: index for index, node in enumerate(joint.graph.nodes)}
    return sorted(saved, key=order.__getitem__)


def _wanted(joint: Joint, backward: set[fx.Node], dependent: set[fx.Node]) -> list[fx.Node]:
    """Sample-dependent forward tensors that the backward reads, through what it recomputes."""
    stack: list[fx.Node] = [node for _, node in joint.gradients]
    seen: set[fx.Node] = set()
    wanted: list[fx.Node] = []
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in dependent and node not in backward:
            wanted.append(node)
        else:
            stack.extend(node.all_input_nodes)
    return wanted


def _base(node: fx.Node) -> fx.Node:
    """The tensor that a chain of views starts from."""
    base = node
    while base.op == "call_function" and base.target in _VIEWS:
        source = base.all_input_nodes[0]
        if not is_tensor(source) and source.target not in _VIEWS:
            break  # one result of an operator with several
        base = source
    return base


def _covers(view: fx.Node, base: fx.Node) -> bool:
    """Whether the view is at least as large as its base."""
    return node_nbytes(view) >= node_nbytes(base)


def _nbytes(nodes: Iterable[fx.Node]) -> int:
    return sum(node_nbytes(node) for node in nodes)


def _drop_unread_statistics(joint: Joint) -> None:
    """Batch norm's backward in training names the running statistics but does not read them."""
    for node in joint.graph.nodes:
        if node.target is aten.native_batch_norm_backward.default and node.args[7] is True:
            args = list(node.args)
            args[3] = args[4] = None
            node.args = tuple(args)


def _accumulate(
    joint: Joint,
) -> tuple[list[tuple[Key, fx.Node]], list[tuple[Key, fx.Node]]]:
    """Add each parameter's gradient to its accumulator where it is made; TANGENTs, then GRADs."""
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
