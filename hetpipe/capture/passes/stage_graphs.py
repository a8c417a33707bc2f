"""Traces the pieces of a model, last stage first, into the graphs of every stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from hetpipe.capture.flat_graph import FlatGraph
from hetpipe.capture.passes.cut import cut_graph
from hetpipe.capture.passes.trace_cache import TracedPiece, Traces
from hetpipe.capture.passes.update_programs import Formulas, trace_norm, trace_predict, trace_update
from hetpipe.capture.program import (
    CONSTANT,
    GRAD,
    Decompositions,
    PassPrograms,
    StageGraphs,
)
from hetpipe.optim.rule import Optimizer

Extra = Literal["predict", "norm", "finite"]
EXTRAS: tuple[Extra, ...] = ("predict", "norm")
"""Programs that only some trainings need: `predict` for predicted weights, `norm` for a clip by
norm. The extra `finite` is a cheaper `norm`, which shows only whether gradients are finite."""


def trace_stages(
    traces: Traces,
    flats: Sequence[FlatGraph],
    cuts: Sequence[int],
    decompositions: Sequence[Decompositions],
    optimizer: Optimizer | None,
    recompute: Sequence[str],
    halves: bool = False,
    extras: Collection[Extra] = EXTRAS,
) -> list[StageGraphs]:
    """Return the graphs of all stages, see `Captured.stage_graphs`.

    `flats` is the same model at each micro-batch size.
    """
    stages = len(decompositions)
    passes: list[dict[int, PassPrograms]] = [{} for _ in range(stages)]
    constants: list[dict[str, Any]] = [{} for _ in range(stages)]
    for flat in flats:
        tangents: frozenset[str] = frozenset()
        for piece in reversed(cut_graph(flat, cuts)):
            n = piece.stage
            traced = traces.passes(
                piece, tangents, decompositions[n], flat.samples, recompute[n], halves
            )
            tangents = traced.tangents
            passes[n][flat.samples] = traced.programs
            constants[n].update(_constants(flat, traced))
    graphs = [StageGraphs(n, passes[n], None, constants[n]) for n in range(stages)]
    trained = _TrainedParameters.of(graphs)
    tied = [(name, n[0], tuple(n[1:])) for name, n in trained.readers.items() if len(n) > 1]
    graphs = [
        replace(stage, tied=tuple(e for e in tied if stage.stage in (e[1], *e[2])))
        for stage in graphs
    ]
    if optimizer is None:
        return graphs
    return [
        _add_update(optimizer, stage, trained, traces.formulas(table), extras)
        for stage, table in zip(graphs, decompositions, strict=True)
    ]


def _constants(flat: FlatGraph, traced: TracedPiece) -> dict[str, Any]:
    values = {**flat.constants, **traced.constants}
    slots = (slot for program in traced.programs.programs for slot in program.inputs)
    names = {slot.name for slot in slots if slot.role == CONSTANT}
    return {name: values[name].contiguous().numpy() for name in sorted(names)}


def _gradient_shapes(stage: StageGraphs) -> dict[str, torch.Tensor]:
    """Return the parameters with a gradient on this stage, as tensors without values."""
    return {
        slot.name: torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device="meta")
        for passes in stage.passes.values()
        for slot in (passes.backward.outputs if passes.backward is not None else ())
        if slot.role == GRAD
    }


@dataclass(frozen=True)
class _TrainedParameters:
    """The parameters with a gradient on any stage: their shapes, and the stages that read them."""

    shapes: dict[str, torch.Tensor]
    readers: dict[str, list[int]]

    @staticmethod
    def of(graphs: Sequence[StageGraphs]) -> _TrainedParameters:
        shapes = {
            name: shape for stage in graphs for name, shape in _gradient_shapes(stage).items()
        }
        readers: dict[str, list[int]] = {}
        for stage in graphs:
            for name in stage.parameters:
                if name in shapes:
                    readers.setdefault(name, []).append(stage.stage)
        return _TrainedParameters(shapes, readers)


def _add_update(
    optimizer: Optimizer,
    stage: StageGraphs,
    trained: _TrainedParameters,
    formulas: Formulas,
    extras: Collection[Extra],
) -> StageGraphs:
    """Return the stage with its update and its extra programs."""
    owned = {name for name in stage.parameters if trained.readers.get(name, [-1])[0] == stage.stage}
    updated = {name: trained.shapes[name] for name in stage.parameters if name in owned}
    zeroed = {name: v for name, v in _gradient_shapes(stage).items() if name not in owned}
    predict = norm = None
    if "predict" in extras:
        predict = trace_predict(optimizer, updated, formulas, zeroed)
    if "norm" in extras or "finite" in extras:
        norm = trace_norm(updated, formulas, zeroed, squares="norm" in extras)
    update = trace_update(optimizer, updated, zeroed, formulas)
    return replace(stage, update=update, predict=predict, norm=norm)
