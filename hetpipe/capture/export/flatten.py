"""Flattens an exported program: inputs and outputs get roles, and random draws get a counter."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from hetpipe.capture.export.named_tensors import exported_name
from hetpipe.capture.export.random_operators import make_explicit
from hetpipe.capture.export.unsupported import where
from hetpipe.capture.flat_graph import FlatGraph
from hetpipe.capture.program import BUFFER, CONSTANT, COUNT, INPUT, LOSS, OUTPUT, PARAM, RNG
from hetpipe.capture.slots import (
    Key,
    constant_name,
    drop_dead,
    has_same_form,
    placeholders,
    results,
)
from hetpipe.errors import CaptureError
from hetpipe.sdk.host.parts import dependents
from hetpipe.sdk.operators.replicas import drop_sums

aten = torch.ops.aten


def flatten(
    program: ExportedProgram,
    leaves: tuple[str, ...],
    aliases: dict[str, str],
    trainable: frozenset[str] | None,
    samples: int,
    output_count: int = 0,
) -> FlatGraph:
    """Name inputs and outputs, make randomness explicit, find the free and differentiable nodes.

    `leaves` names the batch's tensors in order. `aliases` maps the other names of a tied tensor to
    its first name. With `trainable=None` the graph is for forwards only. The last `output_count`
    results are the model's output. Raises `CaptureError` for a graph that no device can run, or
    that trains nothing.
    """
    graph = program.graph_module.graph
    flat = FlatGraph(samples, graph, {}, [], {})
    write_by_where(graph)
    _name_inputs(flat, program, leaves, aliases)
    _name_outputs(flat, program, aliases, output_count)
    rng = make_explicit(graph, int(samples))
    if rng is not None:
        flat.inputs[rng] = (RNG, "rng")
    samples_and_draws = [n for n, (role, _) in flat.inputs.items() if role in (INPUT, RNG)]
    # Replica sums that depend on no sample are for means of equal terms: drop these sums.
    drop_sums(graph, kept=dependents(graph, samples_and_draws))
    _skip_copies(flat)
    drop_dead(graph)
    _check_nodes(graph)
    flat.outputs = [
        (key, node) for (key, _), node in zip(flat.outputs, results(graph), strict=True)
    ]
    flat.free = _free(flat)
    if trainable is None:
        return flat
    flat.differentiable = _differentiable(flat, trainable)
    if not any(key[0] == LOSS and node in flat.differentiable for key, node in flat.outputs):
        raise CaptureError(
            "no gradient of the loss reaches any trainable parameter; check requires_grad, detach "
            "and no_grad in the model"
        )
    return flat


def _skip_copies(flat: FlatGraph) -> None:
    """Let buffers receive values without a final copy, which may be in a later layer."""
    returned = list(results(flat.graph))
    for index, ((role, _), node) in enumerate(flat.outputs):
        source: Any = node.args[0] if node.target is aten.expand.default else None
        if role == BUFFER and source is not None and has_same_form(node, source):
            returned[index] = source
    flat.graph.output_node().args = (tuple(returned),)


def _check_nodes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "get_attr" or isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"the model uses {node.target}{where(node)}: control flow that depends on data is "
                "not supported; use torch.where"
            )
        if node.op == "call_function" and not _is_static(node.meta.get("val")):
            raise CaptureError(
                f"the result of {node.target}{where(node)} has a shape that depends on values, or "
                "becomes a Python number; keep shapes fixed, for instance with torch.where"
            )
        if node.target is aten.embedding.default and len(node.args) > 4 and node.args[4]:
            raise CaptureError(f"an embedding has sparse=True{where(node)}; use sparse=False")


def _is_static(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_static(item) for item in value)
    if isinstance(value, torch.Tensor):
        return all(isinstance(extent, int) for extent in value.shape)
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _name_inputs(
    flat: FlatGraph, program: ExportedProgram, leaves: tuple[str, ...], aliases: dict[str, str]
) -> None:
    by_name = {node.name: node for node in placeholders(flat.graph)}
    remaining, first = iter(leaves), dict[Key, fx.Node]()
    for spec in program.graph_signature.input_specs:
        node, target = by_name[spec.arg.name], spec.target or ""
        name = exported_name(target)
        name = aliases.get(name, name)
        if spec.kind is InputKind.USER_INPUT:
            key = (INPUT, next(remaining))
        elif spec.kind is InputKind.PARAMETER:
            key = (PARAM, name)
        elif spec.kind is InputKind.BUFFER and not node.meta["val"].is_complex():
            key = (BUFFER, name)
        else:  # lifted constants, and complex buffers
            stored = program.constants if target in program.constants else program.state_dict
            if not isinstance(stored[target], torch.Tensor):
                raise CaptureError(
                    f"forward uses a {type(stored[target]).__name__}, which a graph cannot hold: "
                    "draw from torch's default generator, without generator="
                )
            value = stored[target].detach().cpu()
            if value.dtype == torch.bfloat16:
                raise CaptureError(
                    f"forward uses a constant of {value.dtype}, which numpy lacks: make it in "
                    "float32, and convert it with .bfloat16() where it is used"
                )
            key = (CONSTANT, constant_name(target, value))
            flat.constants[key[1]] = value
        if key in first:
            node.replace_all_uses_with(first[key])
        else:
            first[key] = node
            flat.inputs[node] = key


def _name_outputs(
    flat: FlatGraph, program: ExportedProgram, aliases: dict[str, str], output_count: int
) -> None:
    nodes, specs = results(flat.graph), program.graph_signature.output_specs
    losses = sum(spec.kind is OutputKind.USER_OUTPUT for spec in specs) - output_count
    outputs = [(OUTPUT, str(number)) for number in range(output_count)]
    user = iter([(LOSS, LOSS), (COUNT, COUNT)][:losses] + outputs)
    for spec, node in zip(specs, nodes, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT and isinstance(node, fx.Node):
            flat.outputs.append((next(user), node))
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            name = exported_name(spec.target or "")
            if node.meta["val"].is_complex():
                raise CaptureError(
                    f"forward changes the complex buffer {name}; keep its real and imaginary part "
                    "in two buffers"
                )
            flat.outputs.append(((BUFFER, aliases.get(name, name)), node))
        else:
            raise CaptureError(
                f"the model changes {spec.target or 'a result'} in place "
                f"({spec.kind.name.lower()}); work on a copy"
            )


def _free(flat: FlatGraph) -> set[fx.Node]:
    updated = flat.updated_buffers
    free: set[fx.Node] = set()
    for node in flat.graph.nodes:
        if node.op == "placeholder":
            role, name = flat.inputs.get(node, (INPUT, ""))
            if role == CONSTANT or (role == BUFFER and name not in updated):
                free.add(node)
        elif node.op == "call_function" and all(n in free for n in node.all_input_nodes):
            free.add(node)
    return free


def _differentiable(flat: FlatGraph, trainable: frozenset[str]) -> set[fx.Node]:
    """Run the graph without data, and return the nodes whose value requires a gradient."""
    differentiable: set[fx.Node] = set()
    env: dict[fx.Node, Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        for node in flat.graph.nodes:
            if node.op == "output":
                break
            if node.op == "placeholder":
                meta, key = node.meta["val"], flat.inputs.get(node)
                wants = key is not None and key[0] == PARAM and key[1] in trainable
                env[node] = torch.empty(meta.shape, dtype=meta.dtype, requires_grad=wants)
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
            value = env[node]
            if isinstance(value, torch.Tensor) and value.requires_grad:
                differentiable.add(node)
    return differentiable


def write_by_where(graph: fx.Graph) -> None:
    """Replace writes at a mask by `torch.where`, if all positions get the same value.

    Raises `CaptureError` for other writes at a mask, because their shapes depend on values.
    """
    for node in list(graph.nodes):
        if node.target is not aten.index_put.default:
            continue
        source, indices, value, *options = node.args
        masks = [i for i in indices if i is not None and i.meta["val"].dtype is torch.bool]
        if not masks:
            continue
        accumulates = bool(options and options[0]) or bool(node.kwargs.get("accumulate"))
        if len(indices) > 1 or accumulates or not _is_one(source, masks[0], value):
            raise CaptureError(
                f"a write at a mask{where(node)} has a different value for each place, and "
                "the number of places depends on the mask: use torch.where with a value for "
                "every element"
            )
        _replace(graph, node, source, masks[0], value)


def _is_one(source: fx.Node, mask: fx.Node, value: fx.Node) -> bool:
    """Return whether all positions get the same value; False if a shape depends on values."""
    inner = source.meta["val"].ndim - mask.meta["val"].ndim
    outer = value.meta["val"].shape[: max(0, value.meta["val"].ndim - inner)]
    return all(isinstance(extent, int) and extent == 1 for extent in outer)


def _replace(graph: fx.Graph, node: fx.Node, source: Any, mask: Any, value: Any) -> None:
    result, chosen = node.meta["val"], mask.meta["val"]
    shape = [*chosen.shape, *[1] * (result.ndim - chosen.ndim)]
    assert isinstance(result, FakeTensor)
    with graph.inserting_before(node), result.fake_mode:
        spread = graph.call_function(aten.view.default, (mask, shape))
        spread.meta = {**node.meta, "val": torch.empty(shape, dtype=torch.bool)}
        written = graph.call_function(aten.where.self, (spread, value, source))
        written.meta = dict(node.meta)
    node.replace_all_uses_with(written)
    graph.erase_node(node)
