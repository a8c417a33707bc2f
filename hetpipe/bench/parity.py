"""One training step of a whole model on one device, against torch.

The model is one stage: a forward, a backward and an update, run as a worker runs them. The judge is
torch in eager mode and float64, or float32 where the model is very large. Each tensor's gradient g
is compared with the judge's t by norms: ||g - t|| / ||t||.

Some gradients are zero by construction: that of a bias before a batch norm, or of the keys' bias in
an attention. There g is the rounding error of terms that cancel, and a share of ||t|| says nothing.
The judge tells them: ||t|| is below a share `ZERO` of the norm of all gradients together, which
then takes the place of ||t||.

Others are not determined in float32: an element lies within rounding of a rectifier's or a
maximum's decision, and any two correct programs differ there. A model whose gradients are beyond
the limit is trained a second time as its smooth twin, in which nothing decides
(`hetpipe.bench.smooth`). It is equal if the twin keeps the limit, and its own gradients are no more
than `DECISIONS_FACTOR` times as far from the judge as torch's own step in float32 is.

The update is compared for the device's own gradients: torch's optimizer takes them as they are.
Dropout is off on both sides, since torch's own random numbers are not those of a pipeline.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetpipe.bench.eager import torch_optimizer
from hetpipe.bench.judge import ZERO, Step, gradient_errors, judging_dtype, step_of_torch
from hetpipe.bench.smooth import smooth_twin
from hetpipe.zoo.load import optimizer_of
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.program import StageGraphs
    from hetpipe.sdk.backend import Device
    from hetpipe.worker.stage import Stage

LOSS_LIMIT = 1e-4
"""The largest relative error of a loss."""
GRADIENT_LIMIT = 1e-3
"""The largest relative error of a gradient, by norms."""
DECISIONS_FACTOR = 4.0
"""How much further than torch's own float32 gradients may be where decisions differ."""
UPDATE_LIMIT = 1e-5
"""The largest relative error of an updated parameter, by norms."""
MOST_SAMPLES = 4
"""Samples of a step; fewer if the workload's own mini-batch is smaller."""


@dataclass(frozen=True)
class Errors:
    """Relative errors, and of `tensors` gradients the one that is `worst`."""

    judge: str
    loss: float
    gradient: float
    worst: str
    tensors: int
    update: float

    def within(self, gradient_limit: float) -> bool:
        """Whether loss, update and gradients keep their limits."""
        return (
            self.loss <= LOSS_LIMIT
            and self.gradient <= gradient_limit
            and self.update <= UPDATE_LIMIT
        )


@dataclass(frozen=True)
class Parity:
    """One model's row.

    `operators` are those of the programs and `refused` those of them that the device refuses, with
    their numbers of calls; if there are any, nothing ran and there are no errors. If gradients are
    beyond the limit, `twin` has the errors of the smooth twin, and `torch_gradient` the largest
    error of a gradient of torch's own step in float32.
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
    twin: Errors | None = None
    torch_gradient: float | None = None

    @property
    def is_strict(self) -> bool:
        """Whether loss, gradients and update of the model itself are torch's."""
        return self.errors is not None and self.errors.within(GRADIENT_LIMIT)

    @property
    def is_equal(self) -> bool:
        """Whether they are, or differ by decisions alone: those of the smooth twin are torch's."""
        if self.errors is None or self.twin is None or self.torch_gradient is None:
            return self.is_strict
        return self.twin.within(GRADIENT_LIMIT) and self.errors.within(
            DECISIONS_FACTOR * self.torch_gradient
        )


def parity(workload: Workload, device: Device, samples: int | None = None) -> Parity:
    """Train one step of a workload on a device and on torch. Raises `HetpipeError`."""
    samples = samples or min(workload.mini_batch, MOST_SAMPLES)
    model = without_dropout(workload.model)
    row, right = _compared(workload, model, device, samples)
    # Where more is wrong than gradients, a twin has nothing to tell.
    if row.is_strict or row.errors is None or not row.errors.within(math.inf):
        return row
    twin, _ = _compared(workload, smooth_twin(model), device, samples)
    own = step_of_torch(workload, model, next(workload.batches(samples, 0)), torch.float32)
    zero = ZERO[judging_dtype(row.parameters)]
    error = max(gradient_errors(own.gradients, right.gradients, zero).values())
    return replace(row, twin=twin.errors, torch_gradient=error)


def _compared(
    workload: Workload, model: nn.Module, device: Device, samples: int
) -> tuple[Parity, Step]:
    """A step of a model on the workload's first mini-batch, and the judge's."""
    from hetpipe.capture.captured import Captured

    size = sum(parameter.numel() for parameter in model.parameters())
    batch, dtype = next(workload.batches(samples, 0)), judging_dtype(size)
    begin_s = time.perf_counter()
    captured = Captured(model, workload.loss_fn, batch)
    graphs = _graphs(captured, device, workload, samples)
    captured_s = time.perf_counter()
    operators, refused = _operators(device, graphs, samples)
    about = (workload.name, device.info.id, samples, size, captured_s - begin_s, operators, refused)
    if refused:
        return Parity(*about), Step(math.nan, {})
    right = step_of_torch(workload, model, batch, dtype)
    judged_s = time.perf_counter()
    stage = _loaded(device, captured, graphs)
    loaded_s = time.perf_counter()
    step = _step(stage, graphs, captured.leaves(*batch), workload, samples)
    end_s = time.perf_counter()
    errors = _errors(workload, model, right, step, dtype)
    return Parity(*about, errors, loaded_s - judged_s, end_s - loaded_s), right


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


def _errors(
    workload: Workload, model: nn.Module, right: Step, step: Step, dtype: torch.dtype
) -> Errors:
    errors = gradient_errors(step.gradients, right.gradients, ZERO[dtype])
    worst = max(errors, key=errors.__getitem__, default="")
    return Errors(
        judge=str(dtype).removeprefix("torch."),
        loss=abs(step.loss - right.loss) / max(abs(right.loss), 1e-30),
        gradient=errors.get(worst, 0.0),
        worst=worst,
        tensors=len(errors),
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
