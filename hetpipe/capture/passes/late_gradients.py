"""Programs for late gradients: the backward creates them and the update consumes them.

If a micro-batch is a whole mini-batch, nothing is added to a gradient: a backward need not read an
accumulator, and an update need not return a zero. So gradients use no memory during the forward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import fx

from hetpipe.capture.program import GRAD, Program
from hetpipe.capture.slots import has_same_form, make_program, placeholders, results


def first_gradients(program: Program) -> Program:
    """Return a backward that returns gradients instead of sums, and reads no accumulators.

    An exception is a gradient that is also another result or an input: it is still added to its
    accumulator, because every result needs its own memory.
    """
    graph = program.graph.graph
    inputs = [
        (slot.key, node) for slot, node in zip(program.inputs, placeholders(graph), strict=True)
    ]
    accumulators = {node for (role, _), node in inputs if role == GRAD}
    taken = set(results(graph))
    outputs = []
    for slot, node in zip(program.outputs, results(graph), strict=True):
        gradient = _added_gradient(node, accumulators) if slot.role == GRAD else None
        if gradient is None or gradient in taken or gradient.op == "placeholder":
            gradient = node
        taken.add(gradient)
        outputs.append((slot.key, gradient))
    return make_program(graph, inputs, outputs)


def late_names(firsts: Iterable[Program]) -> frozenset[str]:
    """Return the parameters whose gradients none of these backwards adds to an accumulator."""
    names, added = set[str](), set[str]()
    for program in firsts:
        names |= {slot.name for slot in program.outputs if slot.role == GRAD}
        added |= {slot.name for slot in program.inputs if slot.role == GRAD}
    return frozenset(names - added)


def drop_zeros(update: Program, late: Collection[str]) -> Program:
    """Return an update that returns no zero gradients of the parameters `late`."""
    graph = update.graph.graph
    inputs = [
        (slot.key, node) for slot, node in zip(update.inputs, placeholders(graph), strict=True)
    ]
    outputs = [
        (slot.key, node)
        for slot, node in zip(update.outputs, results(graph), strict=True)
        if slot.role != GRAD or slot.name not in late
    ]
    return make_program(graph, inputs, outputs)


def _added_gradient(node: fx.Node, accumulators: Collection[fx.Node]) -> fx.Node | None:
    """Return the gradient in the sum `accumulator + gradient`."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs:
        return None
    accumulator, gradient = node.args
    if accumulator not in accumulators or not isinstance(gradient, fx.Node):
        return None
    return gradient if has_same_form(gradient, node) else None
