"""Trace the pieces of a model, last stage first, into the graphs of every stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from hetpipe.capture.flat import Flat
from hetpipe.capture.joint import Decompositions
from hetpipe.capture.program import CONSTANT, GRAD, PassPrograms, StageGraphs
from hetpipe.capture.split import split
from hetpipe.capture.traces import Traced, Traces
from hetpipe.capture.update import Formulas, trace_norm, trace_predict, trace_update
from hetpipe.optim.rule import Optimizer

Extra = Literal["predict", "norm"]
EXTRAS: tuple[Extra, ...] = ("predict", "norm")
"""Programs that only some trainings need: with predicted weights, with a clip by norm."""


def trace_stages(
    traces: Traces,
    flats: Sequence[Flat],
    cuts: Sequence[int],
    decompositions: Sequence[Decompositions],
    optimizer: Optimizer | None,
    recompute: Sequence[str],
    halves: bool = False,
    extras: Collection[Extra] = EXTRAS,
) -> list[StageGraphs]:
    """The graphs of all stages; `flats` is the same model at each micro-batch size.

    `recompute` has one mode per stage. With `halves` every backward also comes in two halves.
    """
    stages = len(decompositions)
    passes: list[dict[int, PassPrograms]] = [{} for _ in range(stages)]
    constants: list[dict[str, Any]] = [{} for _ in range(stages)]
    for flat in flats:
        tangents: frozenset[str] = frozenset()
        for piece in reversed(split(flat, cuts)):
            n = piece.stage
            traced = traces.passes(
                piece, tangents, decompositions[n], flat.samples, recompute[n], halves
            )
            tangents = traced.tangents
            passes[n][flat.samples] = traced.programs
            constants[n].update(_constants(flat, traced))
    graphs = [StageGraphs(n, passes[n], None, constants[n]) for n in range(stages)]
    tied = _tied(graphs)
    graphs = [
        replace(stage, tied=tuple(e for e in tied if stage.stage in (e[1], *e[2])))
        for stage in graphs
    ]
    if optimizer is None:
        return graphs
    return [
        _updated(optimizer, graphs, n, traces.formulas(decompositions[n]), extras)
        for n in range(stages)
    ]


def _constants(flat: Flat, traced: Traced) -> dict[str, Any]:
    values = {**flat.constants, **traced.constants}
    programs = traced.programs
    names = {
        slot.name
        for program in (programs.forward, programs.backward)
        if program is not None
        for slot in program.inputs
        if slot.role == CONSTANT
    }
    return {name: values[name].contiguous().numpy() for name in sorted(names)}


def _with_gradient(stage: StageGraphs) -> dict[str, torch.Tensor]:
    """The parameters with a gradient on this stage, as shapes."""
    return {
        slot.name: torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device="meta")
        for passes in stage.passes.values()
        for slot in (passes.backward.outputs if passes.backward is not None else ())
        if slot.role == GRAD
    }


def _readers(graphs: Sequence[StageGraphs]) -> dict[str, list[int]]:
    """The stages that read each parameter with a gradient."""
    trained = {name for stage in graphs for name in _with_gradient(stage)}
    readers: dict[str, list[int]] = {}
    for stage in graphs:
        for name in stage.parameters:
            if name in trained:
                readers.setdefault(name, []).append(stage.stage)
    return readers


def _tied(graphs: Sequence[StageGraphs]) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    return tuple(
        (name, stages[0], tuple(stages[1:]))
        for name, stages in _readers(graphs).items()
        if len(stages) > 1
    )


def _updated(
    optimizer: Optimizer,
    graphs: Sequence[StageGraphs],
    index: int,
    formulas: Formulas,
    extras: Collection[Extra],
) -> StageGraphs:
    """The stage with its programs for whole parameters, which run once per mini-batch."""
    stage, readers = graphs[index], _readers(graphs)
    owned = {name for name, stages in readers.items() if stages[0] == index}
    shapes = {name: shape for other in graphs for name, shape in _with_gradient(other).items()}
    updated = {name: shapes[name] for name in stage.parameters if name in owned}
    zeroed = {name: v for name, v in _with_gradient(stage).items() if name not in owned}
    return replace(
        stage,
        update=trace_update(optimizer, updated, zeroed, formulas),
        predict=trace_predict(optimizer, updated, formulas) if "predict" in extras else None,
        norm=trace_norm(updated, formulas) if "norm" in extras else None,
    )
