"""Stages: loads a pipeline's stages on its crew's workers, and moves them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetpipe.capture.program import BUFFER, GRAD, PARAM, STATE, StageGraphs
from hetpipe.checkpoint.checkpoint import Checkpoint
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError
from hetpipe.pipeline.loading import Loading, loading_of
from hetpipe.pipeline.resume import check
from hetpipe.pipeline.schedules import Schedules
from hetpipe.pipeline.streaming import Streaming
from hetpipe.wire.messages import Clip, Keep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hetpipe.capture.captured import Captured
    from hetpipe.optim.rule import Optimizer
    from hetpipe.pipeline.options import PassOptions, UpdateOptions
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.measure import Progress
    from hetpipe.schedule.stream import Stream
    from hetpipe.wire.shares import Shares


@dataclass(frozen=True)
class Subject:
    """The parts of a pipeline that never change, and its first plan."""

    captured: Captured
    crew: Crew
    plan: Plan
    optimizer: Optimizer
    passes: PassOptions
    updates: UpdateOptions


@dataclass(frozen=True)
class _Traced:
    """The graphs of a plan's stages, and their schedules."""

    graphs: list[list[StageGraphs]]
    shares: Shares
    schedules: Schedules
    stream: Stream | None


class Stages:
    """The loaded stages of a plan, with programs for the sizes of micro-batches in use."""

    def __init__(self, subject: Subject, progress: Progress, clip: Clip) -> None:
        """Loads nothing yet. `clip` is the clip of the training's gradients."""
        self._clip = clip
        self._subject, self._crew = subject, subject.crew
        self._crew.pass_limit_s = subject.passes.pass_limit_s
        self._progress = progress
        self.plan = subject.plan
        self.sizes: set[int] = set()
        """Sizes of micro-batches in training."""
        self.evaluated: set[int] = set()
        """Sizes of micro-batches in evaluation."""
        self.schedules: Schedules
        self.streaming: Streaming | None
        self.took_s = 0.0
        """Seconds of the last load or move."""
        self._own_load = 0

    def check_own(self) -> None:
        """Raise `HetpipeError` if somebody has loaded other stages on the crew since."""
        if self._crew.load_count != self._own_load:
            self._crew.check()  # a worker may have failed in a load of ours
            raise HetpipeError(
                "this pipeline's crew has the stages of another pipeline, or of a profile, by now: "
                "a crew serves one pipeline at a time; give each its own, or load() a checkpoint"
            )

    def load(self, values: Checkpoint | None, updates: Sequence[int], step: int) -> None:
        """Load the stages on the workers, with the values of a checkpoint, if there is one.

        `updates` are the updates so far, by stage, and `step` the mini-batches so far.
        """
        subject, crew, begin_s = self._subject, self._crew, time.monotonic()
        self._progress("compiling stages", 0, 1)
        traced = self._traced(self.plan)
        split = subject.captured.parts.split
        initial = split({**subject.captured.parameters, **subject.captured.buffers})
        if values is not None:
            tensors = {role: split(named) for role, named in values.tensors.items()}
            values = replace(values, tensors=tensors)
            if values.manifest:
                check(values, [replicas[0] for replicas in traced.graphs], subject.optimizer)
            initial.update(values.tensors[PARAM])
            initial.update(values.tensors[BUFFER])
        members = [stage.devices for stage in self.plan.stages]
        keep = self._keep(updates, step)
        both = self.sizes | self.evaluated
        crew.load(traced.graphs, members, initial, keep=keep, shares=traced.shares, sizes=both)
        self._begin(traced)
        for role in (STATE, GRAD):
            crew.write(role, {} if values is None else values.tensors.get(role, {}))
        self.took_s = time.monotonic() - begin_s
        self._progress("compiling stages", 1, 1)

    def move(self, plan: Plan, updates: Sequence[int], step: int) -> None:
        """Change to the stages of another plan, at rest. A member that keeps a layer keeps its
        values.

        Raises `HetpipeError` before anything has moved, `WorkerError` if a worker fails.
        """
        begin_s = time.monotonic()
        self._progress("moving layers", 0, 1)
        plan = replace(plan, splits=self.plan.splits)
        traced = self._traced(plan)
        members = [stage.devices for stage in plan.stages]
        both = self.sizes | self.evaluated
        self._crew.move(traced.graphs, members, self._keep(updates, step), both)
        self.plan = plan
        self._begin(traced)
        self.took_s = time.monotonic() - begin_s
        self._progress("moving layers", 1, 1)

    def _traced(self, plan: Plan) -> _Traced:
        """Trace the graphs for the sizes in use. Raises `HetpipeError`."""
        loading = self._loading(plan)
        graphs = loading.graphs(self.sizes, self.evaluated)
        tied = {(owner, others): None for stage in graphs for _, owner, others in stage[0].tied}
        schedules = Schedules(plan, tuple(tied))
        return _Traced(graphs, loading.shares, schedules, schedules.stream())

    def columns(self) -> Iterator[tuple[list[StageGraphs], list[str]]]:
        """Yield, for each number of a replica, the stages and their members; a stage with fewer
        replicas repeats its last one. Passes are for all rows of a micro-batch."""
        loading, devices = self._loading(self.plan), [stage.devices for stage in self.plan.stages]
        for number in range(max(map(len, devices))):
            members = [names[min(number, len(names) - 1)] for names in devices]
            yield loading.whole(number, self.sizes), members

    def _loading(self, plan: Plan) -> Loading:
        subject = self._subject
        return loading_of(
            subject.captured, plan, subject.optimizer, self._crew, subject.passes.recompute,
            self._clip,
        )  # fmt: skip

    def _keep(self, updates: Sequence[int], step: int) -> Keep:
        subject = self._subject
        lr = subject.optimizer.lr_at(max(step, 1))
        late = self.plan.microbatches == 1 and subject.updates.accumulate == 1
        return Keep(self.plan.policy, tuple(updates), lr, subject.passes.check_finite, late)

    def _begin(self, traced: _Traced) -> None:
        """Note that the workers have these stages now."""
        self._own_load = self._crew.load_count
        self.schedules = traced.schedules
        stream, policy = traced.stream, self.plan.policy
        self.streaming = None if stream is None else Streaming(self._crew, stream, policy)
