"""Cuts a flat graph into pieces, one per stage; tensors travel between neighbours only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hetpipe.capture.flat_graph import FlatGraph
from hetpipe.capture.precision import cast_at_cuts
from hetpipe.capture.program import BUFFER, COUNT, CUT, LOSS, OUTPUT
from hetpipe.capture.slots import Key, is_tensor
from hetpipe.sdk.host.parts import extract, reachable

_FINALS = (LOSS, COUNT, OUTPUT, BUFFER)


@dataclass(frozen=True)
class StagePiece:
    """A stage's part of the model; its inputs end, and its outputs begin, with the CUT tensors.

    A tensor that skips this stage is both a CUT input and a CUT output of the same name.
    """

    stage: int
    module: fx.GraphModule
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    differentiable: frozenset[Key]  # inputs that need a gradient


def cut_graph(flat: FlatGraph, cuts: Sequence[int]) -> list[StagePiece]:
    """Return the pieces of the stages, which begin at layer 0 and at each of `cuts`."""
    stage = {node: bisect_right(cuts, layer) for node, layer in flat.layer.items()}
    last_use = {node: max((stage.get(u, s) for u in node.users), default=s)
                for node, s in stage.items()}  # fmt: skip
    names = dict(enumerate(flat.layer_names))
    for node, layer in flat.layer.items():
        node.meta["layer"] = names[layer]
    return [_piece(flat, index, stage, last_use) for index in range(len(cuts) + 1)]


def _piece(
    flat: FlatGraph, index: int, stage: dict[fx.Node, int], last_use: dict[fx.Node, int]
) -> StagePiece:
    crossing = [node for node in stage if is_tensor(node) and last_use[node] > stage[node]]
    arriving = [node for node in crossing if stage[node] < index <= last_use[node]]
    leaving = [node for node in crossing if stage[node] <= index < last_use[node]]
    outputs: list[tuple[Key, fx.Node]] = [((CUT, node.name), node) for node in leaving]
    finals = [(key, node) for key, node in flat.outputs if stage.get(node, 0) == index]
    outputs += sorted(finals, key=lambda pair: _FINALS.index(pair[0][0]))
    needed = reachable([node for _, node in outputs], arriving)
    inputs = [(key, node) for node, key in flat.inputs.items() if node in needed]
    inputs += [((CUT, node.name), node) for node in arriving]
    graph = extract(flat.graph, [node for _, node in inputs], [node for _, node in outputs])
    input_keys, output_keys = [key for key, _ in inputs], [key for key, _ in outputs]
    cast_at_cuts(graph, input_keys, output_keys, flat.precision)
    _label_free(graph)
    return StagePiece(
        index,
        fx.GraphModule(torch.nn.Module(), graph),
        tuple(input_keys),
        tuple(output_keys),
        frozenset(key for key, node in inputs if node in flat.differentiable),
    )


def _label_free(graph: fx.Graph) -> None:
    """Label each free node (see `FlatGraph`) with the layer that uses it first."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and "layer" not in node.meta:
            labels = [user.meta["layer"] for user in node.users if "layer" in user.meta]
            if labels:
                node.meta["layer"] = labels[0]
