"""Turns findings into culprits with readable fields."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import fx

from hetpipe.capture.program import GRAD, PARAM, Program, Slot
from hetpipe.check.reference import Values, call_of, layer_of, tensors_of
from hetpipe.diagnosis.record import Culprit
from hetpipe.diagnosis.rehearsal import Run
from hetpipe.diagnosis.search import Finding
from hetpipe.sdk.graph import dtype_name, graph_inputs, operator_name

LISTED = 6  # most operators or layers in a message


def culprit_of(run: Run, device: str, finding: Finding, values: Values) -> Culprit:
    """Return the culprit for a finding in a run on a device."""
    calls = [node for node in finding.nodes if operator_name(node) != "getitem"]
    names = [operator_name(node) for node in calls]
    if len(names) > LISTED:
        names = [*names[: LISTED // 2], "...", *names[-LISTED // 2 :]]
    read = inputs_of(calls[0]) if len(calls) == 1 else []
    layer = _layers(run.program, calls or [finding.output])
    return replace(
        _culprit(run, device, layer, names, values, finding.output, read),
        error=finding.difference.error,
        allowed=finding.difference.allowed,
        not_finite=_not_finite(finding, values, read),
        reason=finding.failure,
    )


def source_of(
    run: Run, device: str, graph: fx.GraphModule, values: Values, output: fx.Node
) -> Culprit:
    """Return the culprit for `output`, whose value is not finite.

    From the output, the search follows inputs that are not finite. It ends at the culprit: an
    operator with finite inputs, or an input of the program.
    """
    node = output
    while sources := [each for each in inputs_of(node) if not is_finite(values[each])]:
        node = max(sources, key=lambda each: _has_nan(values[each]))
    slots = dict(zip(graph_inputs(graph), run.program.inputs, strict=True))
    if node in slots:
        slot = slots[node]
        name, layer = f"the {_role(slot)} {slot.name}", _layers(run.program, node.users)
        text = f"{_first(values[node])}, already before this mini-batch's {run.name}"
        read: list[fx.Node] = []
    else:
        read = inputs_of(node)
        name, layer = operator_name(call_of(node)), _layers(run.program, [call_of(node)])
        text = f"{_first(values[node])}; {_inputs_text(read, values)}"
    return replace(_culprit(run, device, layer, [name], values, node, read), not_finite=text)


def _culprit(
    run: Run, device: str, layer: str, operators: Sequence[str], values: Values, output: fx.Node,
    read: Sequence[fx.Node],
) -> Culprit:  # fmt: skip
    """Return the culprit at `output`, whose operator has the inputs `read`."""
    inputs = tuple(_form(tensor) for node in read for tensor in tensors_of(values[node]))
    place = run.stage, run.member, device, run.name, run.microbatch, layer
    return Culprit(*place, tuple(operators), _form(values[output]), inputs)


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node's operator."""
    return list(call_of(node).all_input_nodes)


def is_finite(value: object) -> bool:
    """Return whether all floating tensors of a value are finite."""
    return all(bool(t.isfinite().all()) for t in tensors_of(value) if t.is_floating_point())


def _layers(program: Program, nodes: Iterable[fx.Node]) -> str:
    """Return the layers of nodes, or the parameters of an update's nodes, which have no layer."""
    named = dict.fromkeys(layer_of(node) for node in nodes)
    if set(named) <= {"?"}:
        named = dict.fromkeys(name for node in nodes for name in _parameters(program, node))
    return " and ".join(list(named)[:LISTED]) or "?"


def _parameters(program: Program, node: fx.Node) -> list[str]:
    """Return the parameters whose new value or state depends on a node of an update."""
    reached, stack = set[fx.Node](), [node]
    while stack:
        if (each := stack.pop()) not in reached:
            reached.add(each)
            stack += each.users
    graph = next(iter(reached)).graph
    outputs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    slots = zip(outputs, program.outputs, strict=True)
    return [s.name.rpartition("/")[2] for each, s in slots if each in reached and s.role != GRAD]


def _role(slot: Slot) -> str:
    return {PARAM: "parameter", "input": "part of the batch"}.get(slot.role, slot.role)


def _form(value: object) -> str:
    tensor = next(iter(tensors_of(value)))
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _not_finite(finding: Finding, values: Values, read: list[fx.Node]) -> str:
    actual, expected = finding.actual, values[finding.output]
    if actual is None or not actual.is_floating_point() or actual.shape != expected.shape:
        return ""
    wrong = ~actual.isfinite() & expected.isfinite()
    if not bool(wrong.any()):
        return ""
    place = tuple(int(i) for i in wrong.nonzero()[0])
    text = f"{float(actual[place])} at {list(place)}, where torch has {float(expected[place]):.6g}"
    return f"{text}; {_inputs_text(read, values)}" if read else text


def _first(value: torch.Tensor) -> str:
    tensor = next(t for t in tensors_of(value) if not is_finite(t))
    place = tuple(int(i) for i in (~tensor.isfinite()).nonzero()[0])
    return f"{float(tensor[place])} at {list(place)}"


def _inputs_text(read: list[fx.Node], values: Values) -> str:
    if not all(is_finite(values[node]) for node in read):
        return "the operator's inputs were not finite either"
    tensors = [t for node in read for t in tensors_of(values[node]) if t.is_floating_point()]
    spans = [f"{float(t.min()):.3g} to {float(t.max()):.3g}" for t in tensors if t.numel()]
    return "the operator's inputs were finite" + (f", from {' and '.join(spans)}" if spans else "")


def _has_nan(value: object) -> bool:
    return any(bool(t.isnan().any()) for t in tensors_of(value) if t.is_floating_point())
