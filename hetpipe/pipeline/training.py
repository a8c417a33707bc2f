"""Training: runs the mini-batches of one plan on a crew (stations 1 and 16 of
docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetpipe.capture.program import GRAD
from hetpipe.checkpoint.checkpoint import Checkpoint
from hetpipe.crew.feeding import Hook, nothing
from hetpipe.crew.request import StepRequest, StepResult, UpdateRequest
from hetpipe.errors import HetpipeError, NoMeanError, NotFiniteError
from hetpipe.pipeline.batches import (
    check_gradients,
    check_whole,
    mean_loss,
    micro_sizes,
    read,
    size_of,
    sizes_of,
    slices,
)
from hetpipe.pipeline.lossscale import Scaling, choose_scaling, watch_gradients
from hetpipe.pipeline.present import present
from hetpipe.pipeline.results import HandedOut, Result, Results
from hetpipe.pipeline.resume import ROLES, restore
from hetpipe.pipeline.schedules import ALL, SUMMING, UPDATING
from hetpipe.pipeline.stages import Stages
from hetpipe.pipeline.whole_loss import whole_loss_of
from hetpipe.wire.wire import Content

if TYPE_CHECKING:
    from hetpipe.checkpoint.tensors import Tensors
    from hetpipe.pipeline.setup import Setup
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.measure import Progress
    from hetpipe.schedule.action import Schedule

NOT_APPLIED = " Nothing of this update was applied."
RECENT = 64
"""The number of latest mini-batches whose timelines are kept."""


@dataclass(frozen=True)
class Ran:
    """The last run: its schedule (None for a stream), and the samples of each micro-batch."""

    schedule: Schedule | None
    samples: tuple[int, ...]


class Training:
    """A training on a crew's workers. It loads the stages again for a new size of micro-batches.

    Under a schedule that flushes, `step` trains a mini-batch. Under any other schedule, `admit`
    hands a mini-batch in, and `collect` returns its result. At rest, all are collected and flushed.
    """

    def __init__(
        self, setup: Setup, mini_batch: int, resume: Checkpoint | None, progress: Progress
    ) -> None:
        """Load stages for mini-batches of `mini_batch` samples, with the values of `resume`."""
        plan, updates = setup.plan, setup.updates
        self.setup, self._crew = setup, setup.crew
        self.scaling: Scaling = choose_scaling(
            updates.loss_scale, setup.captured.precision.compute, not plan.rule.flushes
        )
        self._clip = watch_gradients(updates.clip, self.scaling, not plan.rule.flushes)
        self._progress = progress
        self.stages = Stages(setup, progress, self._clip)
        self.recent: deque[StepResult] = deque(maxlen=RECENT)
        self.ran: Ran | None = None
        self.watch: Callable[[StepResult, int], None] = lambda result, samples: None
        """Called after every trained mini-batch, with its result and its number of samples."""
        self.not_finite: str | None = None
        """The message of the first error about a mini-batch that was applied anyway."""
        self._handed_out: deque[HandedOut] = deque()
        self.results = Results(setup.optimizer)
        self._accumulated: list[float] = []  # counts of the losses since the last update; mean: 1
        self.stages.expect(micro_sizes(mini_batch, plan.microbatches))
        self.steps, self.forwards, self.updates = 0, 0, [0] * len(plan.stages)
        self.last_save = "no checkpoint of it was saved"
        if resume is None:
            self.stages.load(None, self.updates, 0)
        else:
            self.restore(resume)

    def restore(self, saved: Checkpoint) -> None:
        """Continue from a checkpoint, like `resume.restore`. No mini-batch may be under way."""
        setup = self.setup
        settings = setup.settings if setup.captured.trains else {}
        restore(self, saved, settings, setup.updates.changed, self.stages.load)
        self._accumulated.clear()

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
        samples = sizes_of(self.setup.captured, self.setup.captured.leaves(x, y), self.plan)
        check_whole(samples, self.plan)
        return set(samples) <= self.stages.sizes[Content.FORWARD]

    def step(self, x: Any, y: Any, fed: int = 0, beside: Hook = nothing) -> Result:
        """Train on one whole mini-batch, under a schedule that flushes; `fed` as in `StepRequest`.

        Raises `NotFiniteError` if the loss or a gradient is not finite. Then neither this
        mini-batch nor the mini-batches accumulated before it are applied.
        """
        self.stages.check_own()
        request = self.request(x, y)
        accumulates = self.setup.updates.accumulate > 1
        ops = ALL - UPDATING - SUMMING if accumulates else ALL
        version, handed = self.steps, HandedOut(self.steps, request.samples, self._next_update)
        result = self.run(replace(request, guards=not accumulates, fed=fed), ops, beside)
        try:
            loss = mean_loss(result, request.samples, self.steps)
            check_gradients(result, self.steps)
        except HetpipeError as error:
            if accumulates:
                self._update(drops=True)
            raise _not_applied(error) from error.__cause__
        self.steps += 1
        self.watch(result, size_of(request.samples))
        if not accumulates:
            self._record(result)
        else:
            self._accumulated.append(1.0 if result.counts is None else sum(result.counts))
            if len(self._accumulated) == self.setup.updates.accumulate:
                result = self._update()
        versions = (version,) * len(self.plan.stages)
        return self.results.make(handed, loss, versions, gradient_norm=result.gradient_norm)

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
        self._handed_out.append(HandedOut(self.steps, request.samples, self._next_update))
        self.steps += 1

    def collect(self) -> Result:
        """Return the result of the oldest mini-batch under way. Raises `NotFiniteError` if loss or
        gradients are not finite; the mini-batch was applied, and `not_finite` has the message."""
        streaming = self.stages.streaming
        assert streaming is not None
        self.stages.check_own()
        result = streaming.collect()
        self.recent.append(result)
        handed = self._handed_out.popleft()
        self.ran = Ran(None, handed.samples)
        self.watch(result, size_of(handed.samples))
        try:
            loss = mean_loss(result, handed.samples, handed.number)
            check_gradients(result, handed.number)
        except NoMeanError:
            raise  # the mini-batch was applied with zero gradients
        except NotFiniteError as error:
            self.not_finite = self.not_finite or str(error)
            raise
        return self.results.make(handed, loss, result.versions, live_versions=result.live_versions)

    def flush(self) -> None:
        """Apply all mini-batches that were handed in. All results must have been collected."""
        self.stages.check_own()
        if (streaming := self.stages.streaming) is not None:
            applied, rest = streaming.flush()
            self.updates = [sum(pair) for pair in zip(self.updates, applied, strict=True)]
            if rest.culprit and self.not_finite is None:  # otherwise an error was raised before
                self.not_finite = f"{rest.culprit} was not finite."
                check_gradients(rest, self.steps - 1)

    def apply(self) -> StepResult | None:
        """Update with the accumulated gradients, if there are any, and return the result."""
        return self._update() if self._accumulated else None

    def tensors(self, role: str) -> Tensors:
        """Return the values of a role, such as PARAM, by name; each is read when it is needed. The
        training must be at rest until the last is read."""
        self.stages.check_own()
        return present(self._crew, self.stages.unread, self.setup.captured.parts, role)

    def run(self, request: StepRequest, ops: frozenset[Any], beside: Hook = nothing) -> StepResult:
        """Run one mini-batch with only the operations `ops`."""
        request = replace(request, schedule=self.stages.schedules.of(len(request.samples), ops))
        return self.note(request, self._crew.step(request, beside=beside))

    def note(self, request: StepRequest, result: StepResult) -> StepResult:
        """Keep the result of the last run, and return it."""
        self.recent = deque([result], RECENT)
        self.ran = Ran(request.schedule, request.samples)
        return result

    @property
    def _next_update(self) -> int:
        """The number of the update that applies the next mini-batch."""
        return (self.steps if self.streams else self.updates[0]) + 1

    def request(self, x: Any, y: Any) -> StepRequest:
        setup = self.setup
        leaves, samples, source = read(setup.captured, x, y, self.plan)
        rows = sum(samples)
        self.prepare(set(samples), self.stages.sizes[Content.FORWARD])
        counted, scale = setup.sums_losses, self.scaling.scale
        return StepRequest(
            schedule=(),
            samples=samples,
            feeds=tuple(slices(leaves, samples)),
            loss_tangents=tuple(scale * (1.0 if counted else size / rows) for size in samples),
            rates=setup.optimizer.rates_at(self._next_update),
            number=self.steps + 1,
            seed=setup.passes.seed,
            grad_scale=None if counted else 1.0 / scale,
            loss_scale=scale,
            clip=self._clip,
            source=source,
            whole_loss=whole_loss_of(setup, leaves, samples, self.steps),
        )

    def prepare(self, sizes: set[int], ready: set[int]) -> None:
        """Load stages for these sizes too, in all buckets, unless `ready` contains all sizes."""
        if sizes <= ready:
            return
        self.flush()
        roles = (*ROLES, *self._accumulating())
        values = Checkpoint({}, {role: self.tensors(role).arrays() for role in roles})
        more = self.setup.captured.example.sizes(sizes) - ready
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

    def _update(self, drops: bool = False) -> StepResult:
        """Update with the accumulated gradients, or drop them."""
        grad_scale = math.nan if drops else 1.0 / (sum(self._accumulated) * self.scaling.scale)
        schedule = self.stages.schedules.of(self.plan.microbatches, UPDATING | SUMMING)
        rates = self.setup.optimizer.rates_at(self._next_update)
        update = UpdateRequest(schedule, rates, self.steps, grad_scale, self._clip)
        self._accumulated.clear()
        result = self._crew.step(update)
        if not drops:
            check_gradients(result, self.steps, NOT_APPLIED)
            self._record(result)
        return result

    def _record(self, result: StepResult) -> None:
        """Tell the loss scale whether an update was skipped, and count the update if not."""
        self.scaling.record(result.skipped)
        self.updates = [count + (not result.skipped) for count in self.updates]


def _not_applied(error: HetpipeError) -> HetpipeError:
    """Return the error of a mini-batch that was not applied; if it is not finite, say so."""
    if not isinstance(error, NotFiniteError):
        return error
    return type(error)(error.fact, error.index, error.advice + NOT_APPLIED)
