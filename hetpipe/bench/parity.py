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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hetpipe.bench.eager import torch_optimizer
from hetpipe.zoo.load import optimizer_of
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.program import StageGraphs
    from hetpipe.sdk.backend import Device
    from hetpipe.worker.stage import Stage

Tensors = Mapping[str, torch.Tensor]

LOSS_LIMIT = 1e-4
"""The largest relative error of a loss."""
GRADIENT_LIMIT = 1e-3
"""The largest relative error of a gradient, by norms."""
UPDATE_LIMIT = 1e-5
"""The largest relative error of an updated parameter, by norms."""
ZERO = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Share of the norm of all gradients below which one is zero, by the judge's dtype."""
WIDE_PARAMETERS = 300_000_000
"""Up to so many parameters the judge computes in float64."""
EXCESS_LIMIT = 4.0
"""A tensor in doubt may be off by so many times its doubt."""
DOUBTFUL = GRADIENT_LIMIT / EXCESS_LIMIT
"""The doubt from which on a tensor is in doubt: there the bounds meet."""
ROUNDING = 2.0**-24
"""Relative change of parameters for the doubt: that of rounding them to float32."""
DRAWS = 2
"""Steps in float64 with such changes."""
MINI_BATCHES = 4
"""Mini-batches of which one is chosen."""
LARGE_PARAMETERS = 5_000_000
"""From so many on the first is taken: of the many decisions of a large model some are always close,
and each moves little."""
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


@dataclass(frozen=True)
class _Step:
    """A step's loss, gradients and new parameters."""

    loss: float
    gradients: Tensors
    updated: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class _Right:
    """A mini-batch, torch's step on it in a dtype, and the doubt of each gradient."""

    batch: tuple[Any, Any]
    step: _Step
    doubt: Mapping[str, float]
    dtype: torch.dtype

    @property
    def in_doubt(self) -> int:
        """The number of tensors in doubt."""
        return sum(not doubt <= DOUBTFUL for doubt in self.doubt.values())


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
    right = _right(workload, model, samples, size)
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
) -> tuple[Counter[str], Counter[str]]:
    """Calls by operator: all, and those that the device refuses."""
    from hetpipe.sdk.graph import graph_calls, operator_name

    every, refused = Counter[str](), Counter[str]()
    programs = graphs.passes[samples].programs
    for program in (*programs, *([graphs.update] if graphs.update else [])):
        for node in graph_calls(program.graph):
            every[operator_name(node)] += 1
            if (reason := device.supports(node)) is not None:
                refused[f"{operator_name(node)}: {reason}"] += 1
    return every, refused


def _loaded(device: Device, captured: Captured, graphs: StageGraphs) -> Stage:
    """The compiled stage, with its values on the device."""
    import numpy as np

    from hetpipe.wire.messages import Keep
    from hetpipe.worker.stage import Stage

    values = {**captured.parameters, **captured.buffers}
    return Stage(device, graphs, values, np.zeros, Keep(updates=(0,)))


def _step(
    stage: Stage, graphs: StageGraphs, feed: Mapping[str, Any], workload: Workload, samples: int
) -> _Step:
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
    return _Step(loss * scale, gradients, updated)


def _right(workload: Workload, model: nn.Module, samples: int, size: int) -> _Right:
    """The first mini-batch without doubt, or that of the fewest tensors in doubt."""
    dtype = torch.float64 if size <= WIDE_PARAMETERS else torch.float32
    best: _Right | None = None
    for seed in range(MINI_BATCHES):
        batch = next(workload.batches(samples, seed))
        step = _by_torch(workload, model, batch, dtype)
        found = _Right(batch, step, _doubt(workload, model, batch, step, dtype), dtype)
        if best is None or found.in_doubt < best.in_doubt:
            best = found
        if best.in_doubt == 0 or size >= LARGE_PARAMETERS:
            break
    assert best is not None
    return best


def _doubt(
    workload: Workload, model: nn.Module, batch: tuple[Any, Any], step: _Step, dtype: torch.dtype
) -> dict[str, float]:
    """By tensor; 0 if the judge is no wider than the device."""
    doubt = dict.fromkeys(step.gradients, 0.0)
    if dtype == torch.float32:
        return doubt
    others = [(model, torch.float32), *((_rounded(model, n), dtype) for n in range(DRAWS))]
    for other, own in others:
        gradients = _by_torch(workload, other, batch, own).gradients
        for name, error in gradient_errors(gradients, step.gradients, ZERO[dtype]).items():
            doubt[name] = max(doubt[name], error)
    return doubt


def _rounded(model: nn.Module, seed: int) -> nn.Module:
    """The model in float64 with a small relative error in each parameter."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        for parameter in model.parameters():
            off = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.mul_(1 + ROUNDING * (2 * off - 1))
    return model


def _errors(workload: Workload, model: nn.Module, right: _Right, step: _Step) -> Errors:
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


def _by_torch(
    workload: Workload, model: nn.Module, batch: tuple[Any, Any], dtype: torch.dtype
) -> _Step:
    """Loss and gradients of eager torch."""
    from hetpipe.capture.example import call

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    model = copy.deepcopy(model).to(dtype)
    model.zero_grad()
    x, y = tree_map(cast, batch)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # of tensors that the model makes
    try:
        loss = workload.loss_fn(call(model, x), y)
        loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
        loss.backward()
    finally:
        torch.set_default_dtype(default)
    named = model.named_parameters()
    return _Step(loss.item(), {name: p.grad for name, p in named if p.grad is not None})


def gradient_errors(actual: Tensors, right: Tensors, zero: float) -> dict[str, float]:
    """Relative errors by norms; infinite where a value is not finite, or one lacks a gradient.

    Gradients below the share `zero` of the norm of all are compared with that norm.
    """
    norms = {name: float(tensor.double().norm()) for name, tensor in right.items()}
    whole = math.hypot(*norms.values()) or 1.0
    errors = {}
    for name in {**right, **actual}:
        if name in actual and name in right:
            wrong = float((actual[name].double() - right[name].double()).norm())
            error = wrong / (norms[name] if norms[name] > zero * whole else whole)
        else:  # None is as good as zero
            error = math.inf if bool({**actual, **right}[name].any()) else 0.0
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def _update_error(workload: Workload, model: nn.Module, step: _Step) -> float:
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
