"""Stages: traces the graphs of a plan's stages, loads them on the crew's workers, and moves layers
to other workers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetpipe.capture.program import BUFFER, PARAM, StageGraphs, sharing_stages
from hetpipe.checkpoint.checkpoint import Checkpoint
from hetpipe.checkpoint.tensors import Tensors
from hetpipe.errors import HetpipeError
from hetpipe.pipeline.present import split
from hetpipe.pipeline.resume import check, fit_states
from hetpipe.pipeline.schedules import Schedules, Streaming
from hetpipe.pipeline.stuck import RECENT
from hetpipe.sdk.host.registry import decompositions_of
from hetpipe.wire.messages import Clip, Keep
from hetpipe.wire.shares import Replica, Shares
from hetpipe.wire.wire import IN_EVAL, Content
from hetpipe.words import words

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.passes.stage_graphs import Extra
    from hetpipe.crew.workers import Workers
    from hetpipe.optim.rule import Optimizer
    from hetpipe.pipeline.setup import Setup
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.measure import Progress
    from hetpipe.schedule.stream import Stream
    from hetpipe.wire.messages import Array


Sizes = Mapping[Content, Collection[int]]
"""Sizes of micro-batches, by their forwards: of training, evaluation, inference."""


def loading_of(
    captured: Captured,
    plan: Plan,
    optimizer: Optimizer,
    crew: Workers,
    recompute: str | Sequence[str],
    clip: Clip,
) -> Loading:
    """Return the `Loading` of a plan for training, with this `clip` of gradients."""
    if plan.recompute and recompute == "none":
        recompute = "inputs"  # without recomputation the plan may not fit the memory
    needed: dict[Extra, bool] = {"predict": plan.policy.predicts, "norm": clip.takes_norms}
    needed["finite"] = not clip.takes_norms
    extras = tuple(extra for extra, is_needed in needed.items() if is_needed)
    return Loading(captured, plan, optimizer, crew, recompute, Schedules(plan).halved, extras)


@dataclass(frozen=True)
class Loading:
    """Traces the graphs of a plan for a crew. `recompute` is one mode, or one mode per stage."""

    captured: Captured
    plan: Plan
    optimizer: Optimizer
    crew: Workers
    recompute: str | Sequence[str]
    halves: bool  # whether backwards come in two halves
    extras: Collection[Extra]
    ahead: bool = True  # whether replicas may compile before all replicas are traced

    @property
    def shares(self) -> Shares:
        """The replicas' shares of micro-batches; without flushes, the replicas' turns."""
        weights = tuple(stage.shares for stage in self.plan.stages)
        rule = self.plan.rule
        return Shares(weights, not rule.flushes, rule.averages)

    def graphs(self, sizes: Sizes) -> list[list[StageGraphs]]:
        """Return the graphs of all replicas, by stage, for micro-batches of these sizes. Raises
        `CaptureError` and `HetpipeError`.

        With replicas, members that compile ahead begin while later replicas' graphs are traced.
        """
        devices = [stage.devices for stage in self.plan.stages]
        trained = sizes[Content.FORWARD]
        graphs: dict[tuple[int, int], StageGraphs] = {}  # by stage and replica
        for number in self._order(devices):
            replicas = [Replica(n, min(number, len(names) - 1)) for n, names in enumerate(devices)]
            stages = self._traced(replicas, self._rows(replicas, trained), sizes)
            for n, (names, stage) in enumerate(zip(devices, stages, strict=True)):
                if number < len(names):
                    graphs[n, number] = self._own(stage, number, trained)
                    if self.ahead and max(map(len, devices)) > 1:
                        self.crew.compile_ahead({names[number]: [graphs[n, number]]})
        return [[graphs[n, r] for r in range(len(names))] for n, names in enumerate(devices)]

    def whole(self, number: int, sizes: Collection[int]) -> list[StageGraphs]:
        """Return all stages, with passes for all rows of micro-batches of these sizes.

        A stage has the operators of its replica `number`, or of its last replica if `number` is
        too high.
        """
        counts = [len(stage.devices) for stage in self.plan.stages]
        replicas = [Replica(n, min(number, count - 1)) for n, count in enumerate(counts)]
        return self._traced(replicas, sorted(sizes, reverse=True), {})

    def _order(self, devices: Sequence[Sequence[str]]) -> list[int]:
        """Return the replica numbers; numbers with a member that compiles ahead come first."""

        def waits(number: int) -> bool:
            own = [names[number] for names in devices if number < len(names)]
            return not any(map(self.crew.compiles_ahead, own))

        return sorted(range(max(map(len, devices))), key=waits)

    def _own(self, stage: StageGraphs, replica: int, sizes: Collection[int]) -> StageGraphs:
        """Return the stage with only the passes for a replica's rows."""
        rows = {self.shares.count(Replica(stage.stage, replica), size) for size in sizes}
        return replace(stage, passes={n: p for n, p in stage.passes.items() if n in rows})

    def _traced(
        self, replicas: Sequence[Replica], rows: Sequence[int], sizes: Sizes
    ) -> list[StageGraphs]:
        """Trace all stages. `replicas` has one replica per stage, whose operators the stage gets.

        Passes are traced for each number in `rows`; forwards in eval mode, for the rows of every
        replica in micro-batches of their `sizes`.
        """
        stages_of = zip(self.plan.stages, replicas, strict=True)
        devices = [stage.devices[replica.number] for stage, replica in stages_of]
        tables = [decompositions_of(self.crew.infos[name].backend) for name in devices]
        modes = self.recompute
        stages = self.captured.stage_graphs(
            self.plan.cuts,
            tables,
            rows,
            self.optimizer,
            [modes] * len(devices) if isinstance(modes, str) else modes,
            self.halves,
            self.extras,
        )
        every = [r for stage in range(len(devices)) for r in self.shares.replicas(stage)]
        for content, field in (
            (Content.EVALUATION, "evaluation"),
            (Content.INFERENCE, "inference"),
        ):
            if own := sizes.get(content):
                has_loss = content is Content.EVALUATION
                forwards = self.captured.evaluation_graphs(
                    self.plan.cuts, tables, self._rows(every, own), has_loss
                )
                stages = [_with(*pair, field) for pair in zip(stages, forwards, strict=True)]
        return stages

    def _rows(self, replicas: Sequence[Replica], sizes: Collection[int]) -> list[int]:
        """Return the rows that replicas have in micro-batches of these sizes, the most first."""
        counts = {self.shares.count(replica, size) for replica in replicas for size in sizes}
        return sorted(counts, reverse=True)


def _unread(
    captured: Captured, stages: Sequence[StageGraphs], tensors: Mapping[str, Tensors]
) -> dict[str, dict[str, Array]]:
    """Return, by role, the model's values among `tensors` that no stage reads; none in training."""
    if captured.trains:
        return {}
    params = {name for stage in stages for name in stage.parameters}
    read = params | {name for stage in stages for name in stage.buffers}
    return {
        PARAM: tensors[PARAM].only(captured.parameters.keys() - read).arrays(),
        BUFFER: tensors[BUFFER].only(tensors[BUFFER].keys() - read).arrays(),
    }


def _fault(values: Checkpoint | None, error: HetpipeError) -> str:
    """Return the message of later calls after a load that failed with an error."""
    source = values.directory if values is not None else None
    return (
        f"the last {'load' if source is None else f'restore of {source}'} of this pipeline has "
        "failed, and its stages have only a part of the values: restore() a checkpoint, or close "
        f"the pipeline. The error was: {error}"
    )


def _with(stage: StageGraphs, other: StageGraphs, field: str) -> StageGraphs:
    """Return the stage, with the forwards of another in the field `evaluation` or `inference`."""
    forwards = {size: passes.forward for size, passes in other.passes.items()}
    added: dict[str, Any] = {field: forwards}
    return replace(stage, constants={**stage.constants, **other.constants}, **added)


@dataclass(frozen=True)
class _Traced:
    graphs: list[list[StageGraphs]]
    shares: Shares
    schedules: Schedules
    stream: Stream | None


class Stages:
    """The loaded stages of a plan, with programs for the sizes of micro-batches in use."""

    def __init__(self, setup: Setup, progress: Progress, clip: Clip) -> None:
        """Load nothing yet."""
        self._clip = clip
        self._setup, self._crew = setup, setup.crew
        self._crew.pass_limit_s = setup.passes.pass_limit_s
        self._progress = progress
        self.plan = setup.plan
        self.sizes: dict[Content, set[int]] = {c: set() for c in (Content.FORWARD, *IN_EVAL)}
        """The sizes of micro-batches in use, by their forwards."""
        self.schedules: Schedules
        self.streaming: Streaming | None = None
        self.unread: dict[str, dict[str, Array]] = {}
        """By role, the values of a checkpoint that no forward reads if nothing is trained: a batch
        norm's count of mini-batches, or the parameters of a loss until `evaluate` reads them."""
        self.fault = ""
        """Why the stages have only a part of their values, or ""."""
        self.took_s = 0.0  # seconds of the last load or move
        self.forwards_s: deque[float] = deque(maxlen=RECENT)
        """Seconds of the latest mini-batches in eval mode, since the last load or move."""
        self._own_load = -1

    def expect(self, samples: Collection[int]) -> None:
        """Include programs for micro-batches of these sizes, in all buckets, in the first load."""
        captured = self._setup.captured
        content = Content.FORWARD if captured.trains else Content.INFERENCE
        self.sizes[content] |= captured.example.sizes(samples)

    def check_own(self) -> None:
        """Raise `HetpipeError` if another pipeline or profile has loaded its stages on the crew."""
        if self._crew.load_count != self._own_load:
            self._crew.check()  # the reason may be a failed worker in a load of this pipeline
            if self.fault:
                raise HetpipeError(self.fault)
            raise HetpipeError(
                "this pipeline's crew now has the stages of another pipeline or of a profile, but "
                "a crew serves one pipeline at a time: give each pipeline a separate crew, or "
                "load() a checkpoint"
            )

    def load(self, values: Checkpoint | None, updates: Sequence[int], step: int) -> None:
        """Load the stages on the workers, with the values of a checkpoint, if there is one.

        `updates` counts the updates so far, by stage; `step` counts the mini-batches so far.
        """
        setup, crew, begin_s = self._setup, self._crew, time.monotonic()
        doing = f"compiling {len(self.plan.stages)} stages for {words(self.plan.all_devices)}"
        self._progress(doing, 0, 1)
        traced = self._traced(self.plan)
        captured, parts = setup.captured, setup.captured.parts
        initial = split(Tensors.of({**captured.parameters, **captured.buffers}), parts)
        rest: dict[str, Tensors] = {}
        if values is not None:
            rest = {role: split(Tensors.of(named), parts) for role, named in values.tensors.items()}
            stages = [replicas[0] for replicas in traced.graphs]
            self.unread = _unread(captured, stages, rest)
            if values.manifest:
                rest = fit_states(rest, stages)
                names = [name for unread in self.unread.values() for name in unread]
                check(values.manifest, rest, stages, setup.optimizer, names)
            initial = rest.pop(PARAM).over(rest.pop(BUFFER)).over(initial)
        members = [stage.devices for stage in self.plan.stages]
        keep = self._keep(updates, step)
        sizes = set().union(*self.sizes.values())
        before = crew.load_count
        try:
            crew.load(traced.graphs, members, initial, keep=keep, shares=traced.shares, sizes=sizes)
            for role, tensors in rest.items():
                crew.write(role, tensors)
        except HetpipeError as error:
            if crew.load_count != before:
                self.fault = _fault(values, error)
            raise
        self._begin(traced)
        self.took_s = time.monotonic() - begin_s
        self._progress(doing, 1, 1)

    def move(self, plan: Plan, updates: Sequence[int], step: int) -> None:
        """Change to the stages of another plan. The training must be at rest (see `Training`).

        The values of a layer that stays on its member are not sent. Raises `WorkerError` if a
        worker fails. After any other `HetpipeError`, nothing has moved.
        """
        begin_s = time.monotonic()
        self._progress("moving layers", 0, 1)
        plan = replace(plan, splits=self.plan.splits)
        traced = self._traced(plan)
        members = [stage.devices for stage in plan.stages]
        sizes = set().union(*self.sizes.values())
        self._crew.move(traced.graphs, members, self._keep(updates, step), sizes)
        self.plan = plan
        self._begin(traced)
        self.took_s = time.monotonic() - begin_s
        self._progress("moving layers", 1, 1)

    def _traced(self, plan: Plan) -> _Traced:
        """Trace a plan's graphs for the sizes in use. Raises `HetpipeError`."""
        loading = self._loading(plan)
        graphs = loading.graphs(self.sizes)
        tied = sharing_stages(stage[0] for stage in graphs)
        schedules = Schedules(plan, tied, self._setup.passes.whole_loss)
        return _Traced(graphs, loading.shares, schedules, schedules.stream())

    def columns(self) -> Iterator[tuple[list[StageGraphs], list[str]]]:
        """Yield, for each replica number, all stages and their members.

        A stage with fewer replicas repeats its last replica. Passes are for all rows of a
        micro-batch.
        """
        loading, devices = self._loading(self.plan), [stage.devices for stage in self.plan.stages]
        for number in range(max(map(len, devices))):
            members = [names[min(number, len(names) - 1)] for names in devices]
            yield loading.whole(number, self.sizes[Content.FORWARD]), members

    def _loading(self, plan: Plan) -> Loading:
        setup = self._setup
        return loading_of(
            setup.captured, plan, setup.optimizer, self._crew, setup.passes.recompute,
            self._clip,
        )  # fmt: skip

    def _keep(self, updates: Sequence[int], step: int) -> Keep:
        setup = self._setup
        last = updates[0] if self.plan.rule.flushes else step
        rates = setup.optimizer.rates_at(max(last, 1))
        late = self.plan.microbatches == 1 and setup.updates.accumulate == 1
        return Keep(self.plan.policy, tuple(updates), rates, setup.passes.check_finite, late)

    def _begin(self, traced: _Traced) -> None:
        """Note that the workers have these stages now."""
        self.forwards_s.clear()
        self._own_load, self.fault = self._crew.load_count, ""
        self.schedules = traced.schedules
        stream, policy = traced.stream, self.plan.policy
        self.streaming = None if stream is None else Streaming(self._crew, stream, policy)
