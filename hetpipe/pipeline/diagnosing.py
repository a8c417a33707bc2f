"""Diagnosing: compares a training with torch; the training does not change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hetpipe.capture.program import BUFFER, PARAM, STATE
from hetpipe.check.difference import half_digits
from hetpipe.diagnosis.diagnose import diagnose
from hetpipe.diagnosis.module import ModuleComparison
from hetpipe.diagnosis.record import Diagnosis
from hetpipe.diagnosis.rehearsal import Rehearsal, Start
from hetpipe.pipeline.gradients import gradients_of

if TYPE_CHECKING:
    from hetpipe.pipeline.setup import Setup
    from hetpipe.pipeline.training import Training
    from hetpipe.wire.messages import Array


def diagnose_training(training: Training, x: Any, y: Any) -> Diagnosis:
    """Run the programs of one mini-batch on every device, compare their results with torch, and
    then compare a run of the whole pipeline with the programs; with replicas or accumulated
    gradients, leave out the last comparison. The training must be at rest (see `Training`).

    The first replicas of all stages run the mini-batch, then the second replicas, and so on; each
    replica runs all rows of every micro-batch. Loss and gradients of the first replicas are also
    compared with the model in eager torch. Raises the same errors as `diagnose`.
    """
    training.stages.check_own()
    request = training.request(x, y)
    setup, stages = training.setup, training.stages
    crew = setup.crew
    values = {role: crew.read(role) for role in (PARAM, BUFFER, STATE)}
    runs, notes = 0, tuple[str, ...]()
    for column, (graphs, members) in enumerate(stages.columns()):
        start = Start(graphs, members, values, training.updates, request)
        diagnosis, rehearsal = diagnose(crew, start)
        runs += diagnosis.runs
        diagnosis = replace(diagnosis, runs=runs)
        if column == 0 and diagnosis.verdict in ("healthy", "numbers"):
            module = ModuleComparison(setup.captured, rehearsal, setup.captured.leaves(x, y))
            if module.detail:
                return replace(diagnosis, verdict="capture", detail=module.detail)
            notes = module.notes
        diagnosis = replace(diagnosis, notes=notes)
        if diagnosis.verdict != "healthy":
            return diagnosis
    if max(training.plan.replicas) > 1 or training.accumulated:
        omitted = "the pipeline's own run, since there are replicas or accumulated gradients"
        return replace(diagnosis, notes=(*notes, omitted))
    recent = list(training.recent)
    loss, grads = gradients_of(training, x, y, summed=True)
    training.recent.clear()
    training.recent.extend(recent)
    detail = _apart(setup, rehearsal, loss, grads)
    return replace(diagnosis, verdict="between", detail=detail) if detail else diagnosis


def _apart(setup: Setup, rehearsal: Rehearsal, loss: float, grads: Mapping[str, Array]) -> str:
    """Describe how the pipeline's loss or gradients differ from the programs' results; return an
    empty text if nothing differs."""
    precision = setup.captured.precision
    digits = half_digits(precision.compute, precision.cut)
    if not abs(loss - rehearsal.loss) <= digits * max(abs(rehearsal.loss), 1e-30):
        return f"its loss is {loss:.6g}, the loss of the single programs is {rehearsal.loss:.6g}"
    for stage, named in zip(rehearsal.start.stages, rehearsal.grads, strict=True):
        joined = setup.captured.parts.join({name: own.numpy() for name, own in named.items()})
        owned = {name for name, owner, _ in stage.tied if owner != stage.stage}
        for name in joined.keys() - owned:
            right, actual = torch.from_numpy(joined[name]), torch.from_numpy(grads[name])
            scale = rehearsal.start.request.loss_scale
            error = float((actual.double() * scale - right.double()).abs().max())
            largest = float(right.double().abs().max())
            if not error <= digits * largest + 1e-30:
                member = rehearsal.start.members[stage.stage]
                return (
                    f"its gradient of {name}, in stage {stage.stage} on {member}, is off by "
                    f"{error:.3g}; the single programs' largest value in it is {largest:.3g}"
                )
    return ""
