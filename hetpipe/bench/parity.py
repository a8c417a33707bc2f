"""One training step of a whole model on one device, against torch.

The model is one stage, or several that take turns in the device's memory: forward, backward and
update, run as a worker runs them. The judge is torch in eager mode and float64. Each tensor's
gradient g is compared with the judge's t by norms: ||g - t|| / ||t||.

Some gradients are zero by construction: that of a bias before a batch norm, or of the keys' bias in
an attention. There g is the rounding error of terms that cancel, and a share of ||t|| says nothing.
The judge tells them: ||t|| is below a share `ZERO` of the norm of all gradients together, which
then takes the place of ||t||.

Others are not determined in float32. A model that is beyond a limit, and no more than
`UNDETERMINED_FACTOR` times as far from the judge as torch's own step in float32 is, is trained a
second time in a form that must keep the limits:

- An element lies within rounding of a rectifier's or a maximum's decision, and any two correct
  programs differ there. The form is the smooth twin, in which nothing decides
  (`hetpipe.bench.smooth`).
- A model without decisions, such as the twin itself, amplifies rounding: large terms cancel, or
  each layer makes the errors of those before it larger. The form is the model layer by layer, each
  fed with the judge's own values (`hetpipe.bench.bylayers`), if torch's own step in float32 is
  beyond the limit too.

The update is compared for the device's own gradients: torch's optimizer takes them as they are.
Dropout is off on both sides, since torch's own random numbers are not those of a pipeline.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hetpipe.bench.compared import (
    GRADIENT_LIMIT,
    LOSS_LIMIT,
    Comparison,
    Errors,
    errors_of,
    loss_error,
)
from hetpipe.bench.judge import Distance, Step, losses_with_noise, step_of_torch
from hetpipe.bench.machine import trim_memory
from hetpipe.bench.shared import without_dropout
from hetpipe.bench.smooth import Decisions, smooth_twin
from hetpipe.zoo.load import optimizer_of
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    import numpy as np

    from hetpipe.capture.program import StageGraphs
    from hetpipe.optim.rule import Optimizer
    from hetpipe.sdk.backend import Device

    Array = np.ndarray[Any, Any]

UNDETERMINED_FACTOR = 4.0
"""How much further than torch's own float32 gradients may be where float32 determines none."""
MOST_SAMPLES = 4
"""Samples of a step; fewer if the workload's own mini-batch is smaller."""


@dataclass(frozen=True)
class Parity:
    """One model's row.

    `operators` are those of the programs and `refused` those of them that the device refuses, with
    their numbers of calls; if there are any, nothing ran and there are no errors. If `errors` are
    beyond the limits, `torch` has those of torch's own step in float32 (its loss at the worst of a
    few steps that are off by their last digits), and `twin` the row of the
    smooth twin, or `layers` the errors of the layers. `stages` is the number of those that took
    turns.
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
    twin: Parity | None = None
    layers: Errors | None = None
    stages: int = 1

    @property
    def is_strict(self) -> bool:
        """Whether loss, gradients and update of the model itself are torch's."""
        return self.errors is not None and self.errors.within(GRADIENT_LIMIT)

    @property
    def is_near(self) -> bool:
        """Whether no more differs than float32 may, by torch's own step."""
        if self.errors is None or self.torch is None:
            return self.is_strict
        loss = UNDETERMINED_FACTOR * self.torch.loss if self.torch.loss > LOSS_LIMIT else LOSS_LIMIT
        return self.errors.within(UNDETERMINED_FACTOR * self.torch.gradient, loss)

    @property
    def closer(self) -> Errors | None:
        """The errors of the form in which float32 determines the gradients."""
        if self.twin is None or self.twin.is_strict:
            return self.layers if self.twin is None else self.twin.errors
        return self.twin.closer

    @property
    def is_equal(self) -> bool:
        """Whether they are torch's, or near it, and those of that form are torch's."""
        if self.is_strict or not self.is_near:
            return self.is_strict
        if self.twin is not None:
            return self.twin.is_equal
        return self.layers is not None and self.layers.within(GRADIENT_LIMIT)

    @property
    def verdict(self) -> str:
        """How the model is equal to torch: `strict`, `smooth`, `by layers`, or `smooth by layers`;
        or `no`."""
        if self.is_strict or not self.is_equal:
            return "strict" if self.is_strict else "no"
        if self.twin is None:
            return "by layers"
        return "smooth" if self.twin.is_strict else f"smooth {self.twin.verdict}"


def parity(
    workload: Workload, device: Device, samples: int | None = None, stages: int = 1
) -> Parity:
    """Train one step of a workload on a device and on torch, in stages that take turns.

    The model's parameters are another dtype's while torch runs, and afterwards what they were.
    Raises `HetpipeError`, for instance for more stages than layers.
    """
    samples = samples or min(workload.mini_batch, MOST_SAMPLES)
    return _parity(workload, without_dropout(workload.model), device, samples, stages)


def _parity(
    workload: Workload, model: nn.Module, device: Device, samples: int, stages: int
) -> Parity:
    row, right = _compared(workload, model, device, samples, stages)
    if row.is_strict or row.errors is None:
        return row
    with Decisions() as decisions:
        own = step_of_torch(workload, model, next(workload.batches(samples, 0)), torch.float32)
    errors = errors_of(own, right)
    if row.errors.loss > LOSS_LIMIT:
        noisy = losses_with_noise(workload, model, next(workload.batches(samples, 0)))
        errors = replace(errors, loss=max(errors.loss, *(loss_error(n, right) for n in noisy)))
    row = replace(row, torch=errors)
    if not row.is_near:  # no form has anything to tell
        return row
    if decisions.any:
        return replace(row, twin=_parity(workload, smooth_twin(model), device, samples, stages))
    if row.torch is not None and not row.torch.within(GRADIENT_LIMIT):
        return replace(row, layers=_layers_compared(workload, model, device, samples, right))
    return row


def _compared(
    workload: Workload, model: nn.Module, device: Device, samples: int, stages: int
) -> tuple[Parity, Step]:
    """A step of a model on the workload's first mini-batch, and the judge's."""
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
    loss = step.run(own.rule.lr_at(1), comparison.see)
    step_s = time.perf_counter() - begin_s - step.compile_s - comparison.seconds
    errors = comparison.errors(loss, right)
    return replace(row, errors=errors, compile_s=step.compile_s, step_s=step_s), right


def _layers_compared(
    workload: Workload, model: nn.Module, device: Device, samples: int, right: Step
) -> Errors:
    """The errors of the model's layers, each fed with the judge's values."""
    from hetpipe.bench.bylayers import step_by_layers

    own = _captured(workload, model, device, samples, None)
    comparison = Comparison(own.rule, own.parameters, Distance(right.gradients))
    of_step = (device, own.graphs, samples, own.values, own.feed, own.rule.lr_at(1))
    loss, crossing = step_by_layers(*of_step, comparison.see)
    return replace(comparison.errors(loss, right), crossing=crossing)


@dataclass(frozen=True)
class _Captured:
    """The stages' programs, and by name what they start from: `feed` are the leaves of `batch`."""

    graphs: Sequence[StageGraphs]
    rule: Optimizer
    batch: Any
    model: nn.Module
    buffers: Mapping[str, Array]
    feed: Mapping[str, Array]

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The model's own: do not keep them while torch computes in another dtype."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    @property
    def values(self) -> dict[str, Array]:
        """Parameters and buffers."""
        return {**{name: p.numpy() for name, p in self.parameters.items()}, **self.buffers}


def _captured(
    workload: Workload, model: nn.Module, device: Device, samples: int, stages: int | None
) -> _Captured:
    """The workload's first mini-batch in so many stages, or in one for each layer.

    The capture's copy of the parameters goes with it.
    """
    from hetpipe.bench.inturn import even_cuts
    from hetpipe.capture.captured import Captured
    from hetpipe.sdk.registry import decompositions_of

    batch, rule = next(workload.batches(samples, 0)), optimizer_of(workload)
    captured = Captured(model, workload.loss_fn, batch)
    cuts: Sequence[int] = range(1, len(captured.layer_names))
    if stages is not None:
        cuts = even_cuts(captured, samples, stages) if stages > 1 else ()
    tables = [decompositions_of(device.info.backend)] * (len(cuts) + 1)
    graphs = captured.stage_graphs(cuts, tables, [samples], rule, extras=())
    return _Captured(graphs, rule, batch, model, captured.buffers, captured.leaves(*batch))


def _operators(
    device: Device, stages: Sequence[StageGraphs], samples: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Calls by operator: all, and those that the device refuses."""
    from hetpipe.sdk.graph import graph_calls, operator_name

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
            if (reason := device.supports(node)) is not None:
                refused[f"{operator_name(node)}: {reason}"] += 1
    return dict(every), dict(refused)
