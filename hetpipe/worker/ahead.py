"""Compiles the programs of stages ahead, while the controller traces other stages."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.capture.passes.division import has_sums
from hetpipe.capture.program import Program, StageGraphs
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import require_support
from hetpipe.worker.divided import marked_graph


def compile_ahead(device: Device, stages: Sequence[StageGraphs]) -> None:
    """Let the device begin with the supported programs; loading refuses the others later."""
    graphs = []
    for stage in stages:
        for program in programs_of(stage):
            if has_sums(program):  # its segments depend on the replicas
                continue
            graph = marked_graph(program)
            try:
                require_support(device, graph)
            except UnsupportedOperatorError:
                continue
            graphs.append(graph)
    device.compile_ahead(graphs)


def programs_of(stage: StageGraphs) -> list[Program]:
    """Return all programs of a stage."""
    passes = [program for own in stage.passes.values() for program in own.programs]
    extras = (stage.update, stage.predict, stage.norm)
    return [*passes, *(p for p in extras if p is not None), *stage.evaluation.values()]
