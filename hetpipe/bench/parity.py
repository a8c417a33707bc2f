"""One training step of a whole model on one device, against torch.

The model is one stage: a forward, a backward and an update, run as a worker runs them. The judge is
torch in eager mode and float64, or float32 where the model is very large. Each tensor's gradient g
is compared with the judge's t by norms: ||g - t|| / ||t||.

Some gradients are zero by construction: that of a bias before a batch norm, or of the keys' bias in
an attention. There g is the rounding error of terms that cancel, and a share of ||t|| says nothing.
The judge tells them: ||t|| is below a share `ZERO` of the norm of all gradients together, which
then takes the place of ||t||.

Others are not determined in float32. Terms cancel but for a few digits (the scale of a batch norm
that other batch norms follow), or an element lies within rounding of a rectifier's or a maximum's
decision. The judge tells these, too, without a look at the device: by torch's own float32, and by
float64 with parameters that are off by half a unit in float32's last place. How far a tensor moves
is its doubt. The step is done on the first of some mini-batches that leaves no tensor in doubt, or
the fewest; a tensor in doubt may be off by a few times as much.

The update is compared for the device's own gradients: torch's optimizer takes them as they are.
Dropout is off on both sides, since torch's own random numbers are not those of a pipeline.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetpipe.bench.determined import (
    DOUBTFUL,
    EXCESS_LIMIT,
    GRADIENT_LIMIT,
    ZERO,
    Right,
    Step,
    gradient_errors,
    right_step,
)
from hetpipe.bench.eager import torch_optimizer
from hetpipe.zoo.load import optimizer_of
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.program import StageGraphs
    from hetpipe.sdk.backend import Device
    from hetpipe.worker.stage import Stage

LOSS_LIMIT = 1e-4
"""The largest relative error of a loss."""
UPDATE_LIMIT = 1e-5
"""The largest relative error of an updated parameter, by norms."""
MOST_SAMPLES = 4
"""Samples of a step; fewer if the workload's own mini-batch is smaller."""


@dataclass(frozen=True)
class Errors:
    """Relative errors, and the tensor `worst` of the largest gradient error.

    `gradient` is the largest of all `tensors`, `determined` that of the tensors that are not in
    doubt; of the others, `in_doubt`, `excess` is the largest error over the doubt.
    """

    judge: str
    loss: float
    gradient: float
    worst: str
    tensors: int
    determined: float
    in_doubt: int
    excess: float
    update: float


@dataclass(frozen=True)
class Parity:
    """One model's row.

    `operators` are those of the programs and `refused` those of them that the device refuses, with
    their numbers of calls; if there are any, nothing ran and there are no errors.
    """

    model: str
    device: str
    samples: int
    parameters: int
    capture_s: float
    operators: Mapping[str, int]
    refused: Mapping[str, int]
    errors: Errors | None = None
    compile_s: float = math.nan
    step_s: float = math.nan

    @property
    def is_equal(self) -> bool:
        """Whether loss, gradients and update are torch's."""
        return (
            self.errors is not None
            and self.errors.loss <= LOSS_LIMIT
            and self.errors.determined <= GRADIENT_LIMIT
            and self.errors.excess <= EXCESS_LIMIT
            and self.errors.update <= UPDATE_LIMIT
        )


def parity(workload: Workload, device: Device, samples: int | None = None) -> Parity:
    """Train one step of a workload on a device and on torch. Raises `HetpipeError`."""
    from hetpipe.capture.captured import Captured

    samples = samples or min(workload.mini_batch, MOST_SAMPLES)
    model = without_dropout(workload.model)
    size = sum(parameter.numel() for parameter in model.parameters())
    begin_s = time.perf_counter()
    captured = Captured(model, workload.loss_fn, next(workload.batches(samples, 0)))
    graphs = _graphs(captured, device, workload, samples)
    captured_s = time.perf_counter()
    operators, refused = _operators(device, graphs, samples)
    about = (workload.name, device.info.id, samples, size, captured_s - begin_s, operators, refused)
    if refused:
        return Parity(*about)
    right = right_step(workload, model, samples, size)
    judged_s = time.perf_counter()
    stage = _loaded(device, captured, graphs)
    loaded_s = time.perf_counter()
    step = _step(stage, graphs, captured.leaves(*right.batch), workload, samples)
    end_s = time.perf_counter()
    errors = _errors(workload, model, right, step)
    return Parity(*about, errors, loaded_s - judged_s, end_s - loaded_s)


def without_dropout(model: nn.Module) -> nn.Module:
    """A copy of the model whose dropout layers and recurrent networks drop nothing."""
    from torch.nn.modules.dropout import _DropoutNd

    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            module.dropout = 0.0
    return model


def _graphs(captured: Captured, device: Device, workload: Workload, samples: int) -> StageGraphs:
    from hetpipe.sdk.registry import decompositions_of

    table = decompositions_of(device.info.backend)
    (graphs,) = captured.stage_graphs([], [table], [samples], optimizer_of(workload), extras=())
    return graphs


def _operators(
    device: Device, graphs: StageGraphs, samples: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Calls by operator: all, and those that the device refuses."""
    from hetpipe.sdk.graph import graph_calls, operator_name

    every, refused = Counter[str](), Counter[str]()
    programs = graphs.passes[samples].programs
    for program in (*programs, *([graphs.update] if graphs.update else [])):
        for node in graph_calls(program.graph):
            every[operator_name(node)] += 1
            if (reason := device.supports(node)) is not None:
                refused[f"{operator_name(node)}: {reason}"] += 1
    return dict(every), dict(refused)


def _loaded(device: Device, captured: Captured, graphs: StageGraphs) -> Stage:
    """The compiled stage, with its values on the device."""
    import numpy as np

    from hetpipe.wire.messages import Keep
    from hetpipe.worker.stage import Stage

    values = {**captured.parameters, **captured.buffers}
    return Stage(device, graphs, values, np.zeros, Keep(updates=(0,)))


def _step(
    stage: Stage, graphs: StageGraphs, feed: Mapping[str, Any], workload: Workload, samples: int
) -> Step:
    """One mini-batch of one micro-batch on the device."""
    from hetpipe.capture.program import COUNT, GRAD, LOSS, PARAM
    from hetpipe.schedule.action import Op
    from hetpipe.worker.stage import Pass

    stage.run(Pass(Op.FORWARD, 0, samples, feed))
    stage.run(Pass(Op.BACKWARD, 0, samples, feed, loss_tangent=1.0))
    (loss,), counts = stage.results.take(LOSS) or (), stage.results.take(COUNT)
    scale = 1 / counts[0] if counts else 1.0
    backward = graphs.passes[samples].backward
    slots = backward.outputs if backward is not None else ()
    names = [slot.name for slot in slots if slot.role == GRAD]
    gradients = {name: torch.from_numpy(stage.get((GRAD, name))) * scale for name in names}
    stage.update(optimizer_of(workload).lr_at(1), scale)
    updated = {name: torch.from_numpy(stage.get((PARAM, name))) for name in names}
    return Step(loss * scale, gradients, updated)


def _errors(workload: Workload, model: nn.Module, right: Right, step: Step) -> Errors:
    errors = gradient_errors(step.gradients, right.step.gradients, ZERO[right.dtype])
    worst = max(errors, key=errors.__getitem__, default="")
    doubt = {name: own for name, own in right.doubt.items() if not own <= DOUBTFUL}
    return Errors(
        judge=str(right.dtype).removeprefix("torch."),
        loss=abs(step.loss - right.step.loss) / max(abs(right.step.loss), 1e-30),
        gradient=errors.get(worst, 0.0),
        worst=worst,
        tensors=len(errors),
        determined=max((errors[name] for name in errors if name not in doubt), default=0.0),
        in_doubt=len(doubt),
        excess=max((errors[name] / own for name, own in doubt.items()), default=0.0),
        update=_update_error(workload, model, step),
    )


def _update_error(workload: Workload, model: nn.Module, step: Step) -> float:
    """The largest relative error of a new parameter, by torch's optimizer in float64."""
    largest = 0.0
    parameters = dict(model.named_parameters())
    for name, gradient in step.gradients.items():
        parameter = nn.Parameter(parameters[name].detach().double())
        parameter.grad = gradient.double()
        torch_optimizer(optimizer_of(workload), {name: parameter}).step()
        wrong = (step.updated[name].double() - parameter.detach()).norm()
        error = float(wrong / parameter.detach().norm().clamp(min=1e-30))
        largest = max(largest, error if error == error else math.inf)
    return largest
