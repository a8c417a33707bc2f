"""One training step of a whole model on one device, compared with torch.

The model is one stage, or several stages that take turns in the device's memory. Each stage runs
its forward, backward and update as a worker does. The judge is eager torch in float64. The error of
a gradient g is ||g - t|| / ||t||, where t is the judge's gradient.

Some gradients are zero by construction, such as the gradient of a bias before a batch norm, or of
the keys' bias in an attention. Then g is the rounding error of terms that cancel, and dividing by
||t|| is meaningless. If ||t|| is below the share `ZERO` of the norm of all gradients together, the
error is relative to that norm.

Other gradients are not determined in float32. A value may be within rounding error of the decision
of a rectifier or a maximum, so that two correct programs differ. Or a layer amplifies the errors of
earlier layers. So a model that exceeds a limit still passes if two conditions hold. Its errors are
at most `UNDETERMINED_FACTOR` times the errors of torch's float32 steps: one plain step, and several
steps with a rounding error in each module's result. And it keeps the limits layer by layer, where
each layer gets the judge's values (`hetpipe.bench.bylayers`).

The judge of the update is torch's optimizer, applied to the device's gradients. Dropout is off on
both sides, because torch and a pipeline draw different random numbers.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetpipe.bench.judge import (
    GRADIENT_LIMIT,
    LOSS_LIMIT,
    Comparison,
    Distance,
    Errors,
    Step,
    errors_of,
    step_of_torch,
    steps_in_float32,
    without_dropout,
)
from hetpipe.bench.machine import trim_memory
from hetpipe.zoo.load import optimizer_of
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    import numpy as np

    from hetpipe.capture.program import StageGraphs
    from hetpipe.optim.rule import Optimizer
    from hetpipe.sdk.backend import Device

    Array = np.ndarray[Any, Any]

DECISIONS = (
    "aten.relu.default", "aten.leaky_relu.default", "aten.hardtanh.default",
    "aten.hardswish.default", "aten.hardsigmoid.default", "aten.clamp.default",
    "aten.max_pool2d_with_indices.default", "aten.max_pool2d.default",
)  # fmt: skip
"""Operators at which a new layer begins when layers are compared.

With the judge's rounded values as inputs, they decide as the judge does.
"""
UNDETERMINED_FACTOR = 4.0
"""Allowed error of results that float32 does not determine, as a multiple of torch's error."""
MOST_SAMPLES = 4  # of a step by default; fewer if the workload's mini-batch is smaller


@dataclass(frozen=True)
class Parity:
    """The comparison of one model.

    `operators` counts the calls of each operator in the programs, and `refused` the refused calls,
    by operator and reason. If the device refuses a call, nothing runs and `errors` is None. If
    `errors` exceed the limits, `torch` has the largest errors of torch's float32 steps. If these
    exceed a limit as well and explain `errors`, `layers` has the errors of the separately compared
    layers. `stages` is the number of stages that took turns.
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
    torch: Errors | None = None
    layers: Errors | None = None
    stages: int = 1

    @property
    def is_strict(self) -> bool:
        """Whether loss, gradients and update of the whole model match torch."""
        return self.errors is not None and self.errors.within(GRADIENT_LIMIT)

    @property
    def is_near(self) -> bool:
        """Whether the errors are within a multiple of torch's float32 errors."""
        if self.errors is None or self.torch is None:
            return self.is_strict
        loss = UNDETERMINED_FACTOR * self.torch.loss if self.torch.loss > LOSS_LIMIT else LOSS_LIMIT
        return self.errors.within(UNDETERMINED_FACTOR * self.torch.gradient, loss)

    @property
    def is_equal(self) -> bool:
        """Whether the step matches torch, or is within float32 limits and every layer matches."""
        if self.is_strict or self.layers is None:
            return self.is_strict
        return self.is_near and self.layers.within(GRADIENT_LIMIT)

    @property
    def verdict(self) -> str:
        """The result in a word: `strict` or `by layers` if the model equals torch, else `no`."""
        if self.is_strict:
            return "strict"
        return "by layers" if self.is_equal else "no"


def parity(
    workload: Workload, device: Device, samples: int | None = None, stages: int = 1
) -> Parity:
    """Train one step of a workload on a device, in stages that take turns, and with torch.

    While the judge runs, the model's parameters are in float64. Raises `HetpipeError`, for instance
    for more stages than layers.
    """
    samples = samples or min(workload.mini_batch, MOST_SAMPLES)
    model = without_dropout(workload.model)
    row, right = _compared(workload, model, device, samples, stages)
    if row.is_strict or row.errors is None:
        return row
    steps = steps_in_float32(workload, model, next(workload.batches(samples, 0)))
    own = [errors_of(step, right) for step in steps]
    farthest = max(own, key=lambda errors: errors.gradient)
    row = replace(row, torch=replace(farthest, loss=max(errors.loss for errors in own)))
    # Compare the layers only if float32 may explain the errors: torch's steps exceed the limit too.
    if row.torch is None or row.torch.within(GRADIENT_LIMIT) or not row.is_near:
        return row
    return replace(row, layers=_layers_compared(workload, model, device, samples, right))


def _compared(
    workload: Workload, model: nn.Module, device: Device, samples: int, stages: int
) -> tuple[Parity, Step]:
    """Compare a step on the workload's first mini-batch; return the parity and the judge's step."""
    from hetpipe.bench.inturn import StepInTurn

    begin_s = time.perf_counter()
    own = _captured(workload, model, device, samples, stages)
    capture_s = time.perf_counter() - begin_s
    operators, refused = _operators(device, own.graphs, samples)
    size = sum(parameter.numel() for parameter in model.parameters())
    about = (workload.name, device.info.id, samples, size, capture_s, operators, refused)
    row = Parity(*about, stages=stages)
    if refused:
        return row, Step(math.nan, {})
    trim_memory()
    right = step_of_torch(workload, model, own.batch, torch.float64)
    trim_memory()
    comparison = Comparison(own.rule, own.parameters, Distance(right.gradients))
    begin_s = time.perf_counter()
    step = StepInTurn(device, own.graphs, samples, own.values, own.feed)
    loss = step.run(own.rule.rates_at(1), comparison.see)
    step_s = time.perf_counter() - begin_s - step.compile_s - comparison.seconds
    errors = comparison.errors(loss, right)
    return replace(row, errors=errors, compile_s=step.compile_s, step_s=step_s), right


def _layers_compared(
    workload: Workload, model: nn.Module, device: Device, samples: int, right: Step
) -> Errors:
    """Return the errors of the model's layers; each layer gets the judge's values as inputs.

    Float32 may not determine a layer's gradient. For example, the gradient of a scale before a norm
    is a small sum of large terms, and rounding can make two values of a pooling window equal. If a
    layer's program is right in float64, and torch's float32 operators exceed the limit for the same
    inputs, the device's error may be up to `UNDETERMINED_FACTOR` times torch's error.
    """
    from hetpipe.bench.bylayers import StepByLayers
    from hetpipe.check.device import RoundingDevice

    own = _captured(workload, model, device, samples, None)

    def comparison() -> Comparison:
        return Comparison(own.rule, own.parameters, Distance(right.gradients))

    of_program, of_device, of_torch = comparison(), comparison(), comparison()
    of_step = (samples, own.values, own.feed, own.rule.rates_at(1))
    step = StepByLayers(own.graphs, *of_step, of_program.see)
    loss, crossings = step.run(device, of_device.see)
    errors = replace(of_device.errors(loss, right), crossing=max(crossings.values(), default=0.0))
    if errors.within(GRADIENT_LIMIT):
        return errors
    _, torchs = step.run(RoundingDevice(), of_torch.see)
    right_names = [name for name, e in of_program.gradients.items() if e <= GRADIENT_LIMIT]
    left = _undetermined(of_device.gradients, of_torch.gradients, right_names)
    passed = _undetermined(crossings, torchs, crossings)
    crossing = max((e for key, e in crossings.items() if key not in passed), default=0.0)
    return replace(of_device.errors(loss, right, left), crossing=crossing, passed=len(passed))


def _undetermined(
    errors: Mapping[str, float], torchs: Mapping[str, float], names: Iterable[str]
) -> tuple[str, ...]:
    """Return names where both errors exceed the limit, and torch's error explains the device's."""
    return tuple(
        name
        for name in names
        if min(errors[name], torchs[name]) > GRADIENT_LIMIT
        and errors[name] <= UNDETERMINED_FACTOR * torchs[name]
    )


@dataclass(frozen=True)
class _Captured:
    """The stages' programs, and the values of their inputs; `feed` has the tensors of `batch`."""

    graphs: Sequence[StageGraphs]
    rule: Optimizer
    batch: Any
    model: nn.Module
    buffers: Mapping[str, Array]
    feed: Mapping[str, Array]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's parameters. Read them again after torch has computed in another dtype."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @property
    def values(self) -> dict[str, Array]:
        """Parameters and buffers."""
        return {**{name: p.numpy() for name, p in self.parameters.items()}, **self.buffers}


def _captured(
    workload: Workload, model: nn.Module, device: Device, samples: int, stages: int | None
) -> _Captured:
    """Capture the workload's first mini-batch in `stages` stages; None makes a stage per layer.

    The result does not keep the capture's copy of the parameters.
    """
    from hetpipe.bench.inturn import even_cuts
    from hetpipe.capture.captured import Captured
    from hetpipe.sdk.host.registry import decompositions_of

    batch, rule = next(workload.batches(samples, 0)), optimizer_of(workload)
    starting = DECISIONS if stages is None else ()
    captured = Captured(model, workload.loss_fn, batch, starting=starting)
    cuts: Sequence[int] = range(1, len(captured.layer_names))
    if stages is not None:
        cuts = even_cuts(captured, samples, stages) if stages > 1 else ()
    tables = [decompositions_of(device.info.backend)] * (len(cuts) + 1)
    graphs = captured.stage_graphs(cuts, tables, [samples], rule, extras=())
    return _Captured(graphs, rule, batch, model, captured.buffers, captured.leaves(*batch))


def _operators(
    device: Device, stages: Sequence[StageGraphs], samples: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Count all calls by operator, and the refused calls by operator and reason."""
    from hetpipe.sdk.graph import graph_calls, operator_name
    from hetpipe.sdk.support import refusal

    every, refused = Counter[str](), Counter[str]()
    programs = [
        program
        for graphs in stages
        for program in (*graphs.passes[samples].programs, graphs.update)
        if program is not None
    ]
    for program in programs:
        for node in graph_calls(program.graph):
            every[operator_name(node)] += 1
            if (reason := refusal(device, node)) is not None:
                refused[f"{operator_name(node)}: {reason}"] += 1
    return dict(every), dict(refused)
