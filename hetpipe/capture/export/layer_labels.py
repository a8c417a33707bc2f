"""Assigns every call of a flat graph to a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import zip_longest

import torch
from torch import fx, nn

from hetpipe.capture.disk_cache import ModelSummary
from hetpipe.capture.flat_graph import PARAMETRIZATIONS, FlatGraph, is_getitem, owner, parameters_of
from hetpipe.capture.layers import Layer, LayerGraph
from hetpipe.capture.program import BUFFER, OUTPUT, PARAM
from hetpipe.capture.slots import is_tensor, node_nbytes
from hetpipe.errors import CaptureError
from hetpipe.sdk.graph import operator_name
from hetpipe.sdk.host.parts import reachable


def label(
    flat: FlatGraph,
    model: nn.Module,
    parameters: Mapping[str, torch.Tensor],
    updated_buffers: frozenset[str],
    starting: Collection[str] = (),
) -> None:
    """Fill `flat.layer` and `flat.layer_names`.

    `parameters` has the parameters of model and loss by name; `updated_buffers` names the buffers
    that training changes. The loss joins the last layer.

    A layer starts at a module that owns a parameter of two or more dimensions: at the module's
    first node if the module is a leaf, otherwise at the first node that reads such a parameter. A
    layer also starts at every operator named in `starting`. All other nodes join the layer before
    them. Nodes that only the model's output needs join their operands' last layer.
    """
    modules = dict(model.named_modules())
    matrices = {name: _matrices(module) for name, module in modules.items()}
    starts: list[str] = []
    current, index = "", -1
    trained = reachable([node for key, node in flat.outputs if key[0] != OUTPUT], flat.inputs)
    for node in _calls(flat):
        if is_getitem(node) or node not in trained:
            flat.layer[node] = max((flat.layer.get(n, 0) for n in node.all_input_nodes), default=0)
            continue
        call, path = owner(node)
        if operator_name(node) in starting:
            starts.append(path)
            index = len(starts) - 1
        elif call != current and matrices.get(path):
            read = {id(parameters[name]) for name in _parameters(flat, [node])}
            # The loss's nodes have path "". Parametrizations do not count as children.
            children = {name for name, _ in modules[path].named_children()} - {PARAMETRIZATIONS}
            leaf = path and not children
            if leaf or read & matrices[path]:
                starts.append(path)
                current, index = call, len(starts) - 1
        flat.layer[node] = max(index, 0)
    flat.layer_names = _number(starts or [type(model).__name__])
    _merge_shared_buffers(flat, updated_buffers)


def _matrices(module: nn.Module) -> set[int]:
    """Return the ids of a module's own parameters of 2 or more dimensions, also if parametrized."""
    parametrized = module._modules.get(PARAMETRIZATIONS)
    inside = () if parametrized is None else parametrized.parameters()
    return {id(p) for p in (*module.parameters(recurse=False), *inside) if p.ndim >= 2}


def _calls(flat: FlatGraph) -> list[fx.Node]:
    return [n for n in flat.graph.nodes if n.op == "call_function" and n not in flat.free]


def _parameters(flat: FlatGraph, nodes: list[fx.Node]) -> list[str]:
    """Return the parameters that the nodes read directly, in order."""
    keys = (flat.inputs.get(a, ("", "")) for n in nodes for a in n.all_input_nodes)
    return list(dict.fromkeys(name for role, name in keys if role == PARAM))


def _number(paths: list[str]) -> tuple[str, ...]:
    seen: Counter[str] = Counter()
    names = []
    for path in paths:
        seen[path] += 1
        name = path or "model"
        names.append(name if seen[path] == 1 else f"{name}#{seen[path]}")
    return tuple(names)


def _merge_shared_buffers(flat: FlatGraph, updated: frozenset[str]) -> None:
    """Join the layers that use the same updated buffer, so that a single stage uses the buffer."""
    last = len(flat.layer_names) - 1
    joined = [False] * (last + 1)  # whether layer i is joined with layer i - 1
    for node, (role, name) in flat.inputs.items():
        if role != BUFFER or name not in updated:
            continue
        replacements = [out for key, out in flat.outputs if key == (BUFFER, name)]
        touched = {flat.layer[n] for n in (*node.users, *replacements) if n in flat.layer}
        for index in range(min(touched, default=0) + 1, max(touched, default=0) + 1):
            joined[index] = True
    number, index = [], -1
    for is_joined in joined:
        index += not is_joined
        number.append(index)
    flat.layer = {node: number[layer] for node, layer in flat.layer.items()}
    flat.layer_names = tuple(n for n, j in zip(flat.layer_names, joined, strict=True) if not j)


def check_layers(flat: FlatGraph, first: ModelSummary, training: bool) -> None:
    """Raise `CaptureError` unless the graph has the layers, and in training the parameters, of the
    first graph, of training."""
    mode = "training" if training else "eval mode"
    names = first.layer_names
    independent = "independent of the batch's size and length, and of the mode"
    if names != flat.layer_names:
        pairs = zip_longest(flat.layer_names, names, fillvalue="none")
        number, (name, expected) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
        raise CaptureError(
            f"the model has {len(flat.layer_names)} layers for {flat.samples} samples "
            f"in {mode} but {len(names)} for {first.samples} in training: layer {number} is "
            f"{name}, not {expected}; make the model's structure {independent}"
        )
    unlike = sorted(parameters_of(flat) ^ first.parameters) if training else []
    if unlike:
        one, other = flat.samples, first.samples
        reads, not_ = (other, one) if unlike[0] in first.parameters else (one, other)
        raise CaptureError(
            f"the model reads {unlike[0]} for {reads} samples but not for {not_}, and every update "
            f"changes the same parameters: make the model's structure {independent}"
        )


def layer_graph(flat: FlatGraph) -> LayerGraph:
    """Return the planner's view of a labelled graph."""
    count = len(flat.layer_names)
    nodes: list[list[fx.Node]] = [[] for _ in range(count)]
    for node, index in flat.layer.items():
        nodes[index].append(node)
    return LayerGraph(
        flat.samples,
        tuple(_layer(flat, index, nodes[index]) for index in range(count)),
        _cut_nbytes(flat, count),
    )


def _layer(flat: FlatGraph, index: int, nodes: list[fx.Node]) -> Layer:
    read = reachable(nodes, flat.layer.keys() - set(nodes))
    parameters = {
        flat.inputs[n][1]: node_nbytes(n)
        for n in flat.graph.nodes
        if n in read and flat.inputs.get(n, ("", ""))[0] == PARAM
    }
    operators = dict.fromkeys(operator_name(n) for n in nodes if not is_getitem(n))
    return Layer(
        index,
        flat.layer_names[index],
        tuple(operators),
        tuple(parameters),
        sum(parameters.values()),
    )


def _cut_nbytes(flat: FlatGraph, count: int) -> tuple[int, ...]:
    """Return, after each layer but the last, the bytes of the tensors that later layers read."""
    change = [0] * (count + 1)
    for node, layer in flat.layer.items():
        if is_tensor(node):
            last = max((flat.layer.get(user, layer) for user in node.users), default=layer)
            nbytes = flat.precision.crossing_nbytes(node)
            change[layer] += nbytes
            change[last] -= nbytes
    total, sums = 0, []
    for delta in change[: count - 1]:
        total += delta
        sums.append(total)
    return tuple(sums)
