"""Adds notes to a plan about the operators that a companion or a user's kernel runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hetpipe.sdk.host.registry import decompositions_of, get_backend
from hetpipe.words import format_nbytes

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.program import Program, StageGraphs
    from hetpipe.crew.crew import Crew
    from hetpipe.optim.rule import Optimizer
    from hetpipe.plan.plan import Plan
    from hetpipe.sdk.host.companion import Lent
    from hetpipe.sdk.kernels import UserKernel

FUNCTION = "hetpipe.sdk.host.companion:lent_operators"


def with_program_notes(captured: Captured, crew: Crew, optimizer: Optimizer, plan: Plan) -> Plan:
    """Return the plan with notes about companions and the user's kernels. A note names an operator
    and its layers, and counts its calls in one program.

    Traces nothing if no backend has a companion or a user's kernel.
    """
    members = [stage.devices[0] for stage in plan.stages]
    backends = [get_backend(crew.infos[member].backend) for member in members]
    if not any(backend.lends or backend.user_kernels() for backend in backends):
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
        for kernel in backend.user_kernels():
            notes += _notes_of_kernel(kernel, stage, member, samples)
    return replace(plan, notes=(*plan.notes, *notes))


def _graphs(stage: StageGraphs, samples: int) -> dict[str, bytes]:
    from hetpipe.sdk.graph import dump_graph

    return {name: dump_graph(program.graph) for name, program in _programs(stage, samples).items()}


def _programs(stage: StageGraphs, samples: int) -> dict[str, Program]:
    passes = stage.passes[samples]
    programs = {"forward": passes.forward, "backward": passes.backward, "update": stage.update}
    return {name: program for name, program in programs.items() if program is not None}


def _notes_of_kernel(
    kernel: UserKernel, stage: StageGraphs, member: str, samples: int
) -> list[str]:
    """Return a note for each program that runs the kernel, or one note that no program does."""
    from hetpipe.sdk.graph import graph_calls, operator_name

    notes = []
    for name, program in _programs(stage, samples).items():
        calls = (
            node for node in graph_calls(program.graph) if operator_name(node) == kernel.operator
        )
        runs = [node for node in calls if kernel.runs(node)]
        if runs:
            layers = dict.fromkeys(str(node.meta["layer"]) for node in runs if "layer" in node.meta)
            where = f" of {', '.join(layers)}" if layers else ""
            notes.append(
                f"your kernel {kernel.name} runs {kernel.operator}{where} on {member}, "
                f"{len(runs)} times in the {name} of stage {stage.stage}"
            )
    return notes or [
        f"your kernel {kernel.name} for {kernel.operator} runs nothing of stage {stage.stage} on "
        f"{member}"
    ]


def _note(stage: int, member: str, lends: str, program: str, lent: Lent) -> str:
    layers = ", ".join(layer for layer in lent.layers if layer != "?")
    where = f" of {layers}" if layers else ""
    return (
        f"{lends} runs {lent.operator}{where} for {member}, {lent.calls} times in the {program} of "
        f"stage {stage}: {format_nbytes(lent.there_nbytes)} there, "
        f"{format_nbytes(lent.back_nbytes)} back"
    )
