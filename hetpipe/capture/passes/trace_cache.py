"""Traces equal pieces of a model once, then copies the programs with other names.

Two pieces are equal if their graphs, shapes, dtypes and roles are equal, in order. Names of
parameters, buffers, constants, cut tensors and layers may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from hetpipe.capture.passes.cut import StagePiece
from hetpipe.capture.passes.joint_graph import trace_joint
from hetpipe.capture.passes.partition import partition
from hetpipe.capture.passes.update_programs import Formulas
from hetpipe.capture.program import (
    CUT,
    GRAD,
    PARAM,
    SAVED,
    TANGENT,
    Decompositions,
    PassPrograms,
    Program,
    Slot,
)
from hetpipe.capture.slots import Key
from hetpipe.sdk.graph import canonical


@dataclass(frozen=True)
class TracedPiece:
    """The programs of a piece, its CUT inputs with a gradient, and constants from the trace."""

    programs: PassPrograms
    tangents: frozenset[str]
    constants: Mapping[str, torch.Tensor]


class Traces:
    """All traces of one model."""

    def __init__(self) -> None:
        self.count = 0
        """Number of traces of forwards and backwards so far."""
        self._first: dict[Any, tuple[StagePiece, TracedPiece]] = {}
        self._formulas: dict[int, tuple[Decompositions, Formulas]] = {}  # by id of the table

    def formulas(self, table: Decompositions) -> Formulas:
        """Return the formulas of optimizers, in operators that the table does not decompose."""
        if id(table) not in self._formulas:
            self._formulas[id(table)] = table, Formulas(table)
        return self._formulas[id(table)][1]

    def passes(
        self,
        piece: StagePiece,
        crossing: frozenset[str],
        table: Decompositions,
        samples: int,
        recompute: str,
        halves: bool,
    ) -> TracedPiece:
        """Return a piece's forward and backward. `crossing` names CUT outputs with a tangent."""
        self.formulas(table)  # keeps the table alive, so that its id stays unique
        key = (id(table), samples, recompute, halves, _structure(piece, crossing))
        if key in self._first:
            return _rename(*self._first[key], piece)
        self.count += 1
        joint = trace_joint(piece, crossing, table)
        tangents = frozenset(name for (role, name), _ in joint.gradients if role == CUT)
        programs = partition(joint, samples, recompute, halves)
        traced = TracedPiece(programs, tangents, joint.constants)
        self._first[key] = piece, traced
        return traced


def _structure(piece: StagePiece, crossing: frozenset[str]) -> object:
    """Return everything about a piece that its programs depend on, except names."""
    numbers: dict[object, int] = {}  # numbers of names, in the order of their first use

    def number(name: object) -> int:
        return numbers.setdefault(name, len(numbers))

    nodes = {node: index for index, node in enumerate(piece.module.graph.nodes)}
    rows = []
    for node in nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: f"node {nodes[n]}")
        target = str(node.target) if node.op == "call_function" else ""
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else [value]
        shapes = [
            (tuple(v.shape), str(v.dtype)) if isinstance(v, torch.Tensor) else None for v in values
        ]
        layer = number(("layer", node.meta.get("layer")))
        rows.append((node.op, target, repr(args), repr(kwargs), shapes, layer))
    inputs = [(key[0], number(key), key in piece.differentiable) for key in piece.inputs]
    outputs = [(key[0], number(key), key[1] in crossing) for key in piece.outputs]
    return repr((rows, inputs, outputs))


def _rename(first: StagePiece, traced: TracedPiece, piece: StagePiece) -> TracedPiece:
    """Return the trace of the `first` piece with the names of an equal piece."""
    keys = dict(zip((*first.inputs, *first.outputs), (*piece.inputs, *piece.outputs), strict=True))
    layers = dict(zip(_layers(first), _layers(piece), strict=True))

    def program(program: Program) -> Program:
        graph = canonical(program.graph)
        for node in graph.graph.nodes:
            if (layer := node.meta.get("layer")) is not None:
                node.meta["layer"] = layers.get(layer, layer)
        return Program(graph, _slots(program.inputs, keys), _slots(program.outputs, keys))

    programs = traced.programs
    halves = programs.halves
    passes = PassPrograms(
        programs.samples,
        program(programs.forward),
        None if programs.backward is None else program(programs.backward),
        None if halves is None else (program(halves[0]), program(halves[1])),
    )
    tangents = frozenset(keys[CUT, name][1] for name in traced.tangents)
    return TracedPiece(passes, tangents, traced.constants)


def _layers(piece: StagePiece) -> list[Any]:
    """Return the layers' names in the order of their first use."""
    return list(dict.fromkeys(node.meta.get("layer") for node in piece.module.graph.nodes))


def _slots(slots: Sequence[Slot], keys: Mapping[Key, Key]) -> tuple[Slot, ...]:
    return tuple(replace(slot, name=_name(slot, keys)) for slot in slots)


def _name(slot: Slot, keys: Mapping[Key, Key]) -> str:
    if slot.role == SAVED:
        return slot.name  # only the stage uses this name
    if slot.role == GRAD:
        return keys[PARAM, slot.name][1]
    if slot.role == TANGENT and (CUT, slot.name) in keys:
        return keys[CUT, slot.name][1]
    return keys.get(slot.key, slot.key)[1]
