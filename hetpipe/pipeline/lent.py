"""Notes of a plan about the operators that companions run for devices which lack them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hetpipe.report.units import format_nbytes
from hetpipe.sdk.registry import decompositions_of, get_backend

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.program import StageGraphs
    from hetpipe.crew.crew import Crew
    from hetpipe.optim.rule import Optimizer
    from hetpipe.plan.plan import Plan
    from hetpipe.sdk.companion import Lent

FUNCTION = "hetpipe.sdk.companion:lent_operators"


def with_lent(captured: Captured, crew: Crew, optimizer: Optimizer, plan: Plan) -> Plan:
    """The plan, with a note for each operator that a companion runs: its layers, its calls in a
    micro-batch and an update, and the bytes that cross for them.

    Only workers whose backend has a companion are asked.
    """
    members = [stage.devices[0] for stage in plan.stages]
    backends = [get_backend(crew.infos[member].backend) for member in members]
    if not any(backend.lends for backend in backends):
        return plan
    samples = -(-plan.mini_batch // plan.microbatches)
    tables = [decompositions_of(backend.name) for backend in backends]
    stages = captured.stage_graphs(plan.cuts, tables, [samples], optimizer, extras=())
    notes = []
    for stage, member, backend in zip(stages, members, backends, strict=True):
        if backend.lends:
            (lent,) = crew.call([member], FUNCTION, _graphs(stage, samples))
            notes += [
                _note(stage.stage, member, backend.lends, name, each)
                for name, operators in lent.items()
                for each in operators
            ]
    return replace(plan, notes=(*plan.notes, *notes))


def _graphs(stage: StageGraphs, samples: int) -> dict[str, bytes]:
    from hetpipe.sdk.graph import dump_graph

    passes = stage.passes[samples]
    programs = {"forward": passes.forward, "backward": passes.backward, "update": stage.update}
    return {
        name: dump_graph(program.graph) for name, program in programs.items() if program is not None
    }


def _note(stage: int, member: str, lends: str, program: str, lent: Lent) -> str:
    layers = ", ".join(layer for layer in lent.layers if layer != "?")
    where = f" of {layers}" if layers else ""
    return (
        f"{lends} runs {lent.operator}{where} for {member}, {lent.calls} times in the {program} of "
        f"stage {stage}: {format_nbytes(lent.there_nbytes)} there, "
        f"{format_nbytes(lent.back_nbytes)} back"
    )
