"""Training: runs the mini-batches of one plan on a crew (stations 1 and 16 of
docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.capture.program import BUFFER, GRAD
from hetpipe.checkpoint.checkpoint import Checkpoint
from hetpipe.crew.request import StepRequest, StepResult, UpdateRequest
from hetpipe.errors import HetpipeError, NoMeanError, NotFiniteError
from hetpipe.pipeline.batches import (
    check_gradients,
    check_whole,
    mean_loss,
    micro_sizes,
    parts_of,
    rows_of,
    slices,
)
from hetpipe.pipeline.fit import check_loss
from hetpipe.pipeline.lossscale import Scaling, choose_scaling, watch_gradients
from hetpipe.pipeline.resume import ROLES, last_save, progress_of
from hetpipe.pipeline.schedules import ALL, FORWARDS, SUMMING, UPDATING
from hetpipe.pipeline.stages import Stages

if TYPE_CHECKING:
    from hetpipe.pipeline.setup import Setup
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.measure import Progress
    from hetpipe.schedule.action import Schedule
    from hetpipe.wire.messages import Array

NOT_APPLIED = " Nothing of this update was applied."
RECENT = 64
"""The number of latest mini-batches whose timelines are kept."""


@dataclass(frozen=True)
class Result:
    """One mini-batch of a run.

    `versions`: by stage, how many mini-batches had been applied to the weights that the stage's
    last forward used. `live_versions`: by stage, the most versions that existed together.
    """

    index: int
    loss: float
    versions: tuple[int, ...]
    live_versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ran:
    """The last run: its schedule (None for a stream), and the samples of each micro-batch."""

    schedule: Schedule | None
    samples: tuple[int, ...]


class Training:
    """A training on a crew's workers. It loads the stages again for a new size of micro-batches.

    Under a schedule that flushes, `step` trains a mini-batch. Under any other schedule, `admit`
    hands a mini-batch in, and `collect` returns its result later. The training is at rest if it has
    collected the results of all these mini-batches and has been flushed.
    """

    def __init__(
        self, setup: Setup, mini_batch: int, resume: Checkpoint | None, progress: Progress
    ) -> None:
        """Load stages for mini-batches of `mini_batch` samples, with the values of `resume`."""
        plan, updates = setup.plan, setup.updates
        self.setup, self._crew = setup, setup.crew
        before = None if resume is None else progress_of(resume)
        self.steps = 0 if before is None else before.steps
        self.updates = [0] * len(plan.stages) if before is None else before.updates_under(plan)
        self.scaling: Scaling = choose_scaling(
            updates.loss_scale, setup.captured.precision.compute, not plan.rule.flushes
        )
        if before is not None and before.loss_scale is not None:
            self.scaling.restore(before.loss_scale)
        self._clip = watch_gradients(updates.clip, self.scaling, not plan.rule.flushes)
        self.stages = Stages(setup, progress, self._clip)
        self.recent: deque[StepResult] = deque(maxlen=RECENT)
        self.ran: Ran | None = None
        self.watch: Callable[[StepResult, int], None] = lambda result, samples: None
        """Called after every trained mini-batch, with its result and its number of samples."""
        self.not_finite: str | None = None
        """The message of the first error about a mini-batch that was applied anyway."""
        self._handed_out: deque[tuple[int, tuple[int, ...]]] = deque()  # index and sizes
        self.last_save = last_save(self.steps, resume)
        self._accumulated: list[float] = []  # counts of the losses since the last update; mean: 1
        self.stages.sizes |= set(micro_sizes(mini_batch, plan.microbatches))
        self.stages.load(resume, self.updates, self.steps)

    @property
    def plan(self) -> Plan:
        """The present plan."""
        return self.stages.plan

    @property
    def streams(self) -> bool:
        """Whether mini-batches follow each other without a flush."""
        return self.stages.streaming is not None

    @property
    def under_way(self) -> int:
        """The number of mini-batches that were handed in and are not yet collected."""
        return len(self._handed_out)

    @property
    def accumulated(self) -> int:
        """The number of mini-batches that were accumulated since the last update."""
        return len(self._accumulated)

    @property
    def is_full(self) -> bool:
        """Whether a mini-batch should be collected, because enough are under way."""
        streaming = self.stages.streaming
        return streaming is not None and self.under_way > streaming.window

    def fits(self, x: Any, y: Any) -> bool:
        """Whether the stages are loaded for a mini-batch's sizes. Raises `HetpipeError` for an
        invalid mini-batch."""
        samples = micro_sizes(rows_of(self.setup.captured.leaves(x, y)), self.plan.microbatches)
        check_whole(samples, self.plan)
        return set(samples) <= self.stages.sizes

    def step(self, x: Any, y: Any) -> Result:
        """Train on one whole mini-batch, under a schedule that flushes.

        Raises `NotFiniteError` if the loss or a gradient is not finite. Then neither this
        mini-batch nor the mini-batches accumulated before it are applied.
        """
        self.stages.check_own()
        request = self.request(x, y)
        accumulates = self.setup.updates.accumulate > 1
        ops = ALL - UPDATING - SUMMING if accumulates else ALL
        version = self.steps
        result = self.run(replace(request, guards=not accumulates), ops)
        try:
            loss = mean_loss(result, request.samples, self.steps)
            check_gradients(result, self.steps)
        except NotFiniteError as error:
            if accumulates:
                self._update(float("nan"))
            raise type(error)(error.fact, error.index, error.advice + NOT_APPLIED) from None
        self.steps += 1
        self.watch(result, sum(request.samples))
        if not accumulates:
            self._record(result)
        else:
            self._accumulated.append(1.0 if result.counts is None else sum(result.counts))
            if len(self._accumulated) == self.setup.updates.accumulate:
                self.apply()
        return Result(version, loss, (version,) * len(self.plan.stages))

    def admit(self, x: Any, y: Any) -> None:
        """Hand in a mini-batch, under a schedule without flushes."""
        self.stages.check_own()
        request = self.request(x, y)
        streaming = self.stages.streaming
        assert streaming is not None
        check_whole(request.samples, self.plan)
        if streaming.admitted == 0:
            self.recent.clear()
        streaming.admit(request)
        self._handed_out.append((self.steps, request.samples))
        self.steps += 1

    def collect(self) -> Result:
        """Return the result of the oldest mini-batch under way. Raises `NotFiniteError` if loss or
        gradients are not finite; the mini-batch was applied, and `not_finite` has the message."""
        streaming = self.stages.streaming
        assert streaming is not None
        self.stages.check_own()
        result = streaming.collect()
        self.recent.append(result)
        index, samples = self._handed_out.popleft()
        self.ran = Ran(None, samples)
        self.watch(result, sum(samples))
        try:
            loss = mean_loss(result, samples, index)
            check_gradients(result, index)
        except NoMeanError:
            raise  # the mini-batch was applied with zero gradients
        except NotFiniteError as error:
            self.not_finite = self.not_finite or str(error)
            raise
        return Result(index, loss, result.versions, result.live_versions)

    def flush(self) -> None:
        """Apply all mini-batches that were handed in. All results must have been collected."""
        self.stages.check_own()
        if (streaming := self.stages.streaming) is not None:
            applied, rest = streaming.flush()
            self.updates = [sum(pair) for pair in zip(self.updates, applied, strict=True)]
            if rest.culprit and self.not_finite is None:  # otherwise an error was raised before
                self.not_finite = f"{rest.culprit} was not finite."
                check_gradients(rest, self.steps - 1)

    def apply(self) -> None:
        """Update with the accumulated gradients, if there are any."""
        if self._accumulated:
            self._update(1.0 / (sum(self._accumulated) * self.scaling.scale))

    def evaluate(self, x: Any, y: Any) -> float:
        """Return the mean loss of one mini-batch in eval mode. The training must be at rest."""
        self.stages.check_own()
        request = self.request(x, y, evaluates=True)
        return mean_loss(self.run(request, FORWARDS), request.samples, self.steps)

    def last_results(self, asked: str) -> Sequence[StepResult]:
        """Return the results of the last mini-batches. Raises `HetpipeError` if none has run."""
        if not self.recent:
            raise HetpipeError(f"no step has been taken yet: call step() before {asked}")
        return self.recent

    def read(self, role: str) -> dict[str, Array]:
        """Return the values of a role, such as PARAM, by name. The training must be at rest."""
        self.stages.check_own()
        return self.setup.captured.parts.join(self._crew.read(role))

    def run(self, request: StepRequest, ops: frozenset[Any]) -> StepResult:
        """Run one mini-batch with only the operations `ops`."""
        schedule = self.stages.schedules.of(len(request.samples), ops)
        result = self._crew.step(replace(request, schedule=schedule))
        self.recent = deque([result], RECENT)
        self.ran = Ran(schedule, request.samples)
        return result

    def request(self, x: Any, y: Any, evaluates: bool = False) -> StepRequest:
        setup = self.setup
        leaves = setup.captured.leaves(x, y)
        rows = rows_of(leaves)
        samples = micro_sizes(rows, self.plan.microbatches)
        stages = self.stages
        if len(parts := parts_of(samples, self.plan)) > 1:
            setup.captured.check_means(leaves, parts)
            if evaluates and not stages.evaluated:
                check_loss(setup.captured, parts[0], training=False)
        self._prepare(set(samples), stages.evaluated if evaluates else stages.sizes)
        counted, scale = setup.captured.has_count, self.scaling.scale
        count = self.steps if self.streams else self.updates[0]
        return StepRequest(
            schedule=(),
            samples=samples,
            feeds=tuple(slices(leaves, samples)),
            loss_tangents=tuple(scale * (1.0 if counted else size / rows) for size in samples),
            rates=setup.optimizer.rates_at(count + 1),
            number=self.steps + 1,
            seed=setup.passes.seed,
            grad_scale=None if counted else 1.0 / scale,
            loss_scale=scale,
            clip=self._clip,
            evaluates=evaluates,
        )

    def _prepare(self, sizes: set[int], ready: set[int]) -> None:
        """Load stages that also have passes for these sizes, unless `ready` contains all sizes."""
        if sizes <= ready:
            return
        self.flush()
        roles = (*ROLES, *self._accumulating())
        values = Checkpoint({}, {role: self.read(role) for role in roles})
        more = sizes - ready
        ready |= more
        try:
            self.stages.load(values, self.updates, self.steps)
        except HetpipeError:
            ready -= more
            raise

    def move(self, plan: Plan) -> None:
        """Change to another plan; see `Stages.move`. No gradients may be accumulated."""
        self.stages.check_own()
        self.flush()
        self.stages.move(plan, self.updates, self.steps)

    def _accumulating(self) -> tuple[str, ...]:
        """Return the roles of accumulated values: (GRAD,), or () if nothing is accumulated. First
        sum the gradients of tied parameters on their owners."""
        if not self._accumulated:
            return ()
        if max(self.plan.replicas) > 1:
            raise HetpipeError(
                f"a mini-batch of a new size cannot follow {len(self._accumulated)} of "
                f"{self.setup.updates.accumulate} accumulated mini-batches on replicas: call "
                "flush() before it, or skip it"
            )
        schedule = self.stages.schedules.of(self.plan.microbatches, SUMMING)
        self._crew.step(UpdateRequest(schedule, {}, self.steps, grad_scale=1.0))
        return (GRAD,)

    def _update(self, grad_scale: float) -> None:
        """Update with the accumulated gradients times `grad_scale`; NaN drops the gradients."""
        schedule = self.stages.schedules.of(self.plan.microbatches, UPDATING | SUMMING)
        rates = self.setup.optimizer.rates_at(self.updates[0] + 1)
        self._accumulated.clear()
        request = UpdateRequest(schedule, rates, self.steps, grad_scale, self._clip)
        result = self._crew.step(request)
        if not math.isnan(grad_scale):
            check_gradients(result, self.steps, NOT_APPLIED)
            self._record(result)

    def _record(self, result: StepResult) -> None:
        """Tell the loss scale whether an update was skipped, and count the update if not."""
        self.scaling.record(result.skipped)
        self.updates = [count + (not result.skipped) for count in self.updates]


def gradients_of(
    training: Training, x: Any, y: Any, *, summed: bool = False
) -> tuple[float, dict[str, Array]]:
    """Return loss and gradients of one mini-batch, by parameter. The training must be at rest.

    If the loss is a sum with a count, these are the gradients of the mean or, with `summed`, the
    gradients of the sum.
    """
    crew = training.setup.crew
    buffers = training.read(BUFFER)
    request = training.request(x, y)
    result = training.run(request, ALL - UPDATING)
    grads = training.read(GRAD)
    zeros = {name: np.zeros_like(grad) for name, grad in grads.items()}
    crew.write(BUFFER, buffers)
    crew.write(GRAD, training.setup.captured.parts.split(zeros))
    loss = mean_loss(result, request.samples, training.steps)
    count = 1.0 if summed or result.counts is None else sum(result.counts)
    scale = training.scaling.scale * count
    return loss, {name: np.asarray(grad / scale) for name, grad in grads.items()}
