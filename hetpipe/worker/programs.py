"""The programs of stages: compiles them ahead, and names the ones that a device refuses."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.capture.passes.division import has_sums
from hetpipe.capture.program import Program, StageGraphs
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import of_one_replica, require_support
from hetpipe.worker.divided import mark_results


def compile_ahead(device: Device, stages: Sequence[StageGraphs]) -> None:
    """Let the device begin with the supported programs; loading refuses the others later."""
    graphs = []
    for stage in stages:
        for program in programs_of(stage):
            if has_sums(program):  # its segments depend on the replicas
                continue
            graph = mark_results(program)
            try:
                require_support(device, graph)
            except UnsupportedOperatorError:
                continue
            graphs.append(graph)
    device.compile_ahead(graphs)


def programs_of(stage: StageGraphs) -> list[Program]:
    """Return all programs of a stage."""
    passes = [program for pair in stage.passes.values() for program in pair.programs]
    extras = (stage.update, stage.predict, stage.norm)
    return [*passes, *(p for p in extras if p is not None), *stage.evaluation.values()]


def find_refusals(device: Device, stages: Sequence[StageGraphs]) -> dict[int, str]:
    """Return, by number, the reasons why the device cannot run the programs of a stage."""
    reasons: dict[int, str] = {}
    for number, stage in enumerate(stages):
        try:
            for program in programs_of(stage):
                require_support(device, of_one_replica(program.graph))
        except UnsupportedOperatorError as error:
            reasons[number] = str(error)
    return reasons
