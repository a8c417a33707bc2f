"""Forwards in eval mode: outputs of the model, losses and metrics, over many mini-batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from hetpipe.callbacks.history import COUNTS, LOSSES
from hetpipe.capture.program import PARAM
from hetpipe.crew.request import StepRequest, StepResult, WholeLoss
from hetpipe.errors import HetpipeError, NoMeanError, WorkerError
from hetpipe.pipeline.average import check_average, swap_average
from hetpipe.pipeline.batches import forward_sizes, mean_loss, parts_of, size_of, slices
from hetpipe.pipeline.fit import check_loss
from hetpipe.pipeline.stuck import stuck_after_s
from hetpipe.pipeline.whole_loss import read_values, whole_loss_of
from hetpipe.schedule.action import FORWARDS
from hetpipe.wire.wire import Content

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.pipeline.training import Training
    from hetpipe.wire.messages import Array

WINDOW = 2
"""The number of mini-batches under way: while one leaves the last stage, the next begins."""


@dataclass(frozen=True)
class Evaluation:
    """The mean loss and metrics of a number of samples, in eval mode."""

    loss: float
    samples: int
    metrics: dict[str, float] = field(default_factory=dict)


class UpdatedMetric(Protocol):
    """A metric that collects batches, as in torchmetrics. `compute` may return a dict of values,
    whose names then replace the metric's."""

    def update(self, output: Any, y: Any) -> object: ...

    def compute(self) -> Any: ...


Metric = Callable[[Any, Any], Any] | UpdatedMetric
"""A function of the model's output and `y` that returns a mean over the samples, or an object that
collects mini-batches."""


class Forwards:
    """The forwards of mini-batches; up to `WINDOW` are under way.

    Between `begin` and `end` no other call may use the weights: with `ema` the average of the
    weights is in their place. Raises `HetpipeError` if there is no average.
    """

    def __init__(self, training: Training, content: Content, keeps_output: bool, ema: bool) -> None:
        if ema:
            check_average(training)
        self._training, self._ema = training, ema
        self._has_whole_loss = content is Content.EVALUATION and training.setup.passes.whole_loss
        self._content = Content.INFERENCE if self._has_whole_loss else content
        self._keeps_output = keeps_output
        self._values: Mapping[str, Array] = {}  # the parameters of the loss of whole mini-batches
        self._under_way: deque[tuple[StepRequest, Mapping[str, Array]]] = deque()
        self._begins_s: deque[float] = deque()  # of the mini-batches under way
        self._results: deque[tuple[StepRequest, StepResult]] = deque()

    def begin(self) -> None:
        """Prepare the weights. The training must be at rest."""
        if self._ema:
            swap_average(self._training)
        if self._has_whole_loss:
            training = self._training
            self._values = read_values(training.setup, training.stages.unread.get(PARAM, {}))

    def end(self) -> None:
        """Wait until no mini-batch is under way, and put the weights back."""
        self.settle()
        if self._ema:
            swap_average(self._training)

    def repeat(self) -> None:
        """Begin again on other stages with the same weights, with all mini-batches under way."""
        under_way, results = self._under_way, self._results.copy()
        try:
            self._under_way, self._begins_s = deque(), deque()
            self.begin()
            for _, leaves in under_way:
                self.admit(leaves)
        except WorkerError:  # this call will be repeated
            self._under_way, self._results = under_way, results
            raise

    def admit(self, leaves: Mapping[str, Array]) -> None:
        """Begin the forwards of a mini-batch."""
        training = self._training
        samples = forward_sizes(training.setup.captured, leaves, training.plan)
        ready = training.stages.sizes[self._content]
        if self._content is Content.EVALUATION:
            self._check_loss(leaves, samples)
        if not set(samples) <= ready:
            self.settle()  # stages will be loaded
            training.prepare(set(samples), ready)
        schedule = training.stages.schedules.of(len(samples), FORWARDS)
        request = StepRequest(
            schedule=schedule,
            samples=samples,
            feeds=tuple(slices(leaves, samples)),
            loss_tangents=(0.0,) * len(samples),
            rates={},
            number=training.steps + 1,
            seed=training.setup.passes.seed,
            grad_scale=1.0,
            forwards=self._content,
            keeps_output=self._keeps_output,
            whole_loss=self._whole_loss(leaves, samples),
        )
        training.stages.check_own()
        training.setup.crew.post(request)
        self._under_way.append((request, leaves))
        self._begins_s.append(time.monotonic())

    def settle(self) -> None:
        """Wait until no mini-batch is under way."""
        while self._under_way:
            self._collect()

    def take(self, ends: bool = False) -> tuple[StepRequest, StepResult] | None:
        """Return the next result, and count it in `Training.forwards`; None if there is none yet
        or, at the end, none any more."""
        if len(self._under_way) > (0 if ends else WINDOW) and not (ends and self._results):
            self._collect()
        if not self._results:
            return None
        self._training.forwards += 1
        return self._results.popleft()

    def _collect(self) -> None:
        request, _ = self._under_way[0]
        training, setup, stages = self._training, self._training.setup, self._training.stages
        stages.check_own()
        if setup.survival.survives and setup.passes.pass_limit_s is None:
            setup.crew.pass_limit_s = stuck_after_s(stages.forwards_s)
        result = training.note(request, setup.crew.collect())
        stages.forwards_s.append(time.monotonic() - self._begins_s.popleft())
        self._under_way.popleft()
        if request.whole_loss is not None:
            try:
                result = result.with_loss(request.whole_loss(result.outputs))
            except HetpipeError as error:
                result = replace(result, failure=error)
        self._results.append((request, result))

    def _whole_loss(
        self, leaves: Mapping[str, Array], samples: tuple[int, ...]
    ) -> Callable[[Mapping[str, Array]], WholeLoss] | None:
        """Return the function that computes the loss of a mini-batch; None if forwards do that."""
        if not self._has_whole_loss:
            return None
        setup, step = self._training.setup, self._training.steps
        return whole_loss_of(setup, leaves, samples, step, self._values)

    def _check_loss(self, leaves: Mapping[str, Array], samples: tuple[int, ...]) -> None:
        """Raise `HetpipeError` if micro-batches do not have the loss of their mini-batch."""
        training = self._training
        captured, parts = training.setup.captured, parts_of(samples, training.plan)
        if len(parts) > 1:
            captured.check_means(leaves, parts)
            if not training.stages.sizes[Content.EVALUATION]:
                check_loss(captured, parts[0], training=False)


def output_of(captured: Captured, request: StepRequest, result: StepResult, length: int) -> Any:
    """Return the model's output for a mini-batch. `length` is the length of its tensors before they
    were padded; a dimension of the output that has the bucket's length is cut to it."""
    size, padding = size_of(request.samples), captured.padding
    output, arrays = captured.output(size), result.outputs
    if padding is not None and (bucket := padding.length(size)) != length:
        other = padding.another(size)
        pair = bucket, padding.length(other)
        arrays = output.cut(arrays, length, captured.output(other), pair)
    return output.rebuild(arrays)


class Means:
    """Collects the losses and metrics of mini-batches."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        if not isinstance(metrics, Mapping):
            raise HetpipeError(
                f"metrics are {type(metrics).__name__}: give a dict of functions, and mini-batches "
                "as one iterable, such as evaluate([(x, y)])"
            )
        for name, metric in metrics.items():
            if not callable(metric) and not hasattr(metric, "update"):
                raise HetpipeError(
                    f"metric {name!r} is {metric!r}: give a function of (output, y), or an object "
                    "with update(output, y) and compute()"
                )
        self._metrics = metrics
        self._sums = dict.fromkeys(metrics, 0.0)
        self._loss = self._weight = 0.0
        self._samples = 0

    def add(self, request: StepRequest, result: StepResult, index: int) -> None:
        """Add the loss of a mini-batch. A mini-batch whose loss counts nothing has no weight."""
        samples = sum(request.samples)
        self._samples += samples
        weight = samples if result.counts is None else sum(result.counts)
        if weight:
            self._loss += mean_loss(result, request.samples, index) * weight
            self._weight += weight

    def measure(self, output: Any, y: Any, samples: int) -> None:
        """Add the metrics of a mini-batch."""
        for name, metric in self._metrics.items():
            if hasattr(metric, "update"):
                metric.update(output, y)
            else:
                self._sums[name] += number_of(name, metric(output, y)) * samples

    def result(self) -> Evaluation:
        """Return the means. Raises `NoMeanError` if no sample counts."""
        if not self._weight:
            raise NoMeanError(
                f"the loss of {self._samples} samples has no mean",
                0,
                ": give evaluate() at least one mini-batch (x, y) whose loss counts a sample",
            )
        found: dict[str, float] = {}
        for name, metric in self._metrics.items():
            if not hasattr(metric, "compute"):
                found[name] = self._sums[name] / self._samples
            elif isinstance(value := metric.compute(), Mapping):
                for key, each in value.items():
                    others = {*LOSSES, *COUNTS, *found, *self._metrics} - ({name} - found.keys())
                    if key in others:
                        raise HetpipeError(
                            f"metric {name!r} returned a value {key!r}, as another metric or a "
                            "value of each epoch is named: return another name"
                        )
                    found[key] = number_of(key, each)
            else:
                found[name] = number_of(name, value)
        return Evaluation(self._loss / self._weight, self._samples, found)


def number_of(name: str, value: Any) -> float:
    """Return the value of a metric. Raises `HetpipeError` unless it is one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise HetpipeError(
            f"metric {name!r} is a {type(value).__name__}{shape}: return one number, such as a "
            "mean over the samples"
        ) from error
