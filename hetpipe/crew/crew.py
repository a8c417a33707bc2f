"""Crew: started workers, one per member of a cluster, that run stages and schedules."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import TracebackType
from typing import Any

import numpy as np

from hetpipe.capture.program import StageGraphs
from hetpipe.cluster.cluster import Cluster
from hetpipe.crew.assembly import Assembly
from hetpipe.crew.fleet import Fleet
from hetpipe.crew.launcher import launch
from hetpipe.errors import HetpipeError
from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.lanes import worker_rows
from hetpipe.sdk.info import DeviceInfo
from hetpipe.simulate.timeline import Span, Timeline
from hetpipe.wire import messages as say
from hetpipe.wire.messages import Array
from hetpipe.wire.pieces import streams
from hetpipe.wire.shares import Place, Shares
from hetpipe.worker.runner import Closing, closing

FIRST_STEP_S = 600.0
LEAST_PATIENCE_S = 60.0
PATIENCE = 20  # times the longest step so far


@dataclass(frozen=True)
class StepRequest:
    """One mini-batch. Sequences have one entry per micro-batch.

    `grad_scale` None: 1 / sum of the counts that the last stage reports, over `loss_scale`, by
    which `loss_tangents` were multiplied. `lag` and `ahead`, by stage, choose versions of the
    weights (see `hetpipe.worker.weights`).
    """

    schedule: Schedule
    samples: tuple[int, ...]
    feeds: Sequence[Mapping[str, Array]]
    loss_tangents: tuple[float, ...]
    lr: float
    number: int
    seed: int = 0
    grad_scale: float | None = None
    loss_scale: float = 1.0
    clip: say.Clip | None = None
    evaluates: bool = False
    lag: Mapping[int, Sequence[int]] = field(default_factory=dict)
    ahead: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A part of a stream. Numbers in the schedule count from mini-batch `first`; `begins` is the
    mini-batch that comes with it, `closing` what ends a micro-batch (of the whole stream)."""

    first: int
    begins: int
    microbatches: int
    closing: Closing


@dataclass(frozen=True)
class StepResult:
    """Losses and counts per micro-batch, and when everything happened; the rest is by stage."""

    losses: tuple[float, ...]
    counts: tuple[float, ...] | None
    timeline: Timeline
    versions: tuple[int, ...] = ()  # that the last forward used, counted in updates
    live_versions: tuple[int, ...] = ()  # most at once
    most_in_flight: tuple[int, ...] = ()  # micro-batches that a backward has yet to read
    peak_nbytes: tuple[int, ...] = ()  # most on a replica's device, see `hetpipe.worker.memory`
    skipped: bool = False  # whether the update was left out


@dataclass(frozen=True)
class _Posted:
    """What was handed out: when, and in how many lanes by each worker."""

    begin_s: float
    lanes: Sequence[int]


class Crew:
    """Workers with their devices open. A context manager; no process outlives `close`.

    The first failure of a worker ends all: it is raised as `WorkerError`, then and ever after.
    """

    def __init__(self, cluster: Cluster, fleet: Fleet, start_timeout_s: float) -> None:
        self._fleet = fleet
        self._control = fleet.control
        self._close = weakref.finalize(self, fleet.close)
        self.cluster = cluster
        self._index = {member.id: i for i, member in enumerate(cluster.members)}
        self._assembly: Assembly | None = None
        self._members: list[tuple[str, ...]] = []  # of each stage, its replicas
        self._rows: dict[tuple[str, ...], int] = {}  # of a schedule, by who does it
        self._scripts: dict[int, tuple[int, Schedule]] = {}
        self._posted: deque[_Posted] = deque()  # what is under way
        self._clip: say.Clip | None = None
        self._loss_scale = 1.0
        self._skipped = False
        self._counts: list[float] = []  # of the mini-batch at hand, by replica of the last stage
        self._squares: list[float] = []  # of the gradients, by worker, of the step at hand
        self._origin_s = 0.0  # of timelines: when the step, or the stream, began
        self._serial = 0
        self._longest_s: float | None = None
        with self._guarded():
            everyone = list(self._index.values())
            opened = self._control.gather(everyone, start_timeout_s)
        self.infos: dict[str, DeviceInfo] = dict(zip(self._index, opened, strict=True))

    @classmethod
    def start(
        cls,
        cluster: Cluster,
        *,
        heartbeat_s: float = 1.0,
        silence_s: float = 8.0,
        start_timeout_s: float = 120.0,
    ) -> Crew:
        """Start one worker per member and open its device.

        A worker that gives no sign of life for `silence_s` is taken for dead. Raises `BackendError`
        for a device that is not there, `HetpipeError` for a backend that no process can import,
        `WorkerError` if a worker does not come up.
        """
        return cls(
            cluster, launch(cluster, heartbeat_s, silence_s, start_timeout_s), start_timeout_s
        )

    def call(self, members: Sequence[str], function: str, *args: Any) -> list[Any]:
        """Run `module:function` as `function(device, *args)` inside these workers at once.

        Returns the results in the order of `members`; arguments and results must pickle. Emulated
        speeds do not apply.
        """
        return list(self.call_each(function, dict.fromkeys(members, args)).values())

    def call_each(self, function: str, arguments: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Like `call`, with arguments of its own for each member; results by member."""
        workers = [self._worker(member) for member in arguments]
        with self._guarded():
            for worker, args in zip(workers, arguments.values(), strict=True):
                self._fleet.send(worker, say.Call(function, tuple(args)))
            return dict(zip(arguments, self._control.gather(workers), strict=True))

    def load(
        self,
        stages: Sequence[StageGraphs | Sequence[StageGraphs]],
        members: Sequence[str | Sequence[str]],
        values: Mapping[str, Array],
        state_init: Callable[..., Array] = np.zeros,
        keep: say.Keep = say.Keep(),  # noqa: B008 - frozen
        shares: Shares | None = None,
        sizes: Collection[int] = (),
    ) -> None:
        """Make `members[n]` stage n: upload parameters and buffers, compile all programs.

        Gradients start at zero, optimizer state at `state_init(shape, dtype)`. Members that occur
        again have several stages; a stage with several members and graphs has replicas, which
        divide a micro-batch, whose size is one of `sizes`, by their `shares` (default equal). A
        schedule's rows are the members in the order of their first stage; replicas have one
        together, unless they take turns. Replaces what was loaded before. Raises `HetpipeError` if
        stages, members and values do not fit together.
        """
        graphs = [[each] if isinstance(each, StageGraphs) else list(each) for each in stages]
        places = [(each,) if isinstance(each, str) else tuple(each) for each in members]
        if list(map(len, graphs)) != list(map(len, places)):
            raise HetpipeError(
                f"{len(graphs)} stages need a member each, and one per replica, got "
                f"{len(places)}: {list(members)}"
            )
        shares = shares or Shares(tuple((1.0,) * len(replicas) for replicas in graphs))
        assembly = Assembly(graphs, values, shares, sizes)
        for member in {member for replicas in places for member in replicas}:
            self._worker(member)
        self._assembly, self._members = None, places
        workers = dict.fromkeys(places)
        if shares.in_turn:
            workers = dict.fromkeys((member,) for replicas in places for member in replicas)
        self._rows = {replicas: row for row, replicas in enumerate(workers)}
        self._check_rows()
        with self._guarded():
            streaming = {member for member, info in self.infos.items() if streams(info)}
            plugged = assembly.plug(self.cluster, places, self._index, streaming)
            for member, (ends, fds) in plugged.items():
                own = tuple(
                    say.StageLoad(graphs[n][r], r, assembly.values_of(graphs[n][r]))
                    for n, r in self._places(member)
                )
                with fds:
                    message = say.Load(own, keep, state_init, ends, shares)
                    self._fleet.send(self._index[member], message, fds.numbers)
            self._control.gather(self._workers)
        self._assembly, self._longest_s = assembly, None
        self._scripts.clear()
        self._posted.clear()

    def _check_rows(self) -> None:
        everyone = [member for replicas in self._rows for member in replicas]
        if len(set(everyone)) != len(everyone):
            raise HetpipeError(
                f"members {[list(replicas) for replicas in self._rows]}: one that has several "
                "stages must have the same fellow replicas in all of them, and be there once"
            )

    def _places(self, member: str) -> list[Place]:
        """The stages of a member, and which replica of them it is."""
        return [
            (n, replicas.index(member))
            for n, replicas in enumerate(self._members)
            if member in replicas
        ]

    def step(self, request: StepRequest, timeout_s: float | None = None) -> StepResult:
        """Run one mini-batch to its end.

        `timeout_s` limits how long nothing may move; default 20 times the longest step so far, at
        least 60 s. Raises `WorkerError`; `HetpipeError` before anything runs if the request does
        not fit the stages.
        """
        self.post(request)
        return self.collect(timeout_s)

    def post(self, request: StepRequest, part: Part | None = None) -> None:
        """Hand out a mini-batch, without waiting for it.

        As a `part` of a stream it needs not be done when the workers go on; else it is drained.
        """
        assembly = self._loaded()
        rows = len(self._rows)
        assembly.check(
            request.schedule, rows, request.samples, request.feeds, request.loss_tangents
        )
        if request.grad_scale is None and not assembly.has_count and request.samples:
            raise HetpipeError("grad_scale is None, but the loss has no count to derive it from")
        self._serial += 1
        # A schedule of its own may leave out micro-batches; it has one mini-batch all the same.
        place = part or Part(0, 0, max(len(request.samples), 1), closing(request.schedule))
        with self._guarded():
            now_s = time.monotonic()
            if part is None or part.begins == 0:
                self._origin_s = now_s
            of_workers = worker_rows(request.schedule)
            lanes = [of_workers[row] for row in self._row_of.values()]
            self._posted.append(_Posted(now_s, [len(own) for own in lanes]))
            self._clip, self._loss_scale = request.clip, request.loss_scale
            self._skipped = False
            script, schedule = self._script(request.schedule)
            for member, own in zip(self._row_of, lanes, strict=True):
                batch = self._batch(assembly, member, request, place.begins)
                message = say.Step(
                    self._serial, script, schedule, own, place.closing, place.first,
                    place.microbatches, place.begins, batch,
                    drain=part is None or not request.samples, evaluates=request.evaluates,
                )  # fmt: skip
                self._fleet.send(self._index[member], message)

    def collect(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the oldest mini-batch that was handed out."""
        patience_s = timeout_s if timeout_s is not None else self._patience_s()
        with self._guarded():
            posted = self._posted.popleft()
            reports = self._control.gather(self._workers, patience_s, self._answer)
            self._longest_s = max(self._longest_s or 0.0, time.monotonic() - posted.begin_s)
        return self._result(reports, posted)

    @property
    def under_way(self) -> int:
        """How many mini-batches are handed out and not collected."""
        return len(self._posted)

    def read(
        self, role: str, names: Sequence[str] | None = None, replica: int = 0
    ) -> dict[str, Array]:
        """Present values of PARAM, BUFFER, STATE or GRAD slots, by name; default all.

        What several stages have (tied weights) comes from its owner, the first of them. Of a stage
        with replicas it is what that `replica` has.
        """
        assembly = self._loaded()
        owners = assembly.owners(role, names)
        merged: dict[str, Array] = {}
        with self._guarded():
            for stage, own in owners.items():
                worker = self._index[self._members[stage][replica]]
                self._fleet.send(worker, say.Read(stage, role, tuple(own)))
                merged.update(self._control.gather([worker])[0])
        wanted = names if names is not None else [name for own in owners.values() for name in own]
        return {name: merged[name] for name in wanted}

    def write(self, role: str, values: Mapping[str, Array]) -> None:
        """Replace values of PARAM, BUFFER, STATE or GRAD slots, on every stage that has them.

        A tied gradient is a sum over stages: its owner gets the value, the others zero.
        """
        assembly = self._loaded()
        shares = assembly.by_stage(role, values)
        with self._guarded():
            for stage, share in shares.items():
                for member in self._members[stage]:
                    worker = self._index[member]
                    self._fleet.send(worker, say.Write(stage, role, share))
                    self._control.gather([worker])

    def close(self) -> None:
        """End all workers; safe to call twice."""
        self._close()
        self._control.fail("the crew is closed")

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever interrupts a conversation with the workers ends it: they are out of step."""
        try:
            self._control.check()
            yield
        except BaseException:
            self.close()
            raise

    def _loaded(self) -> Assembly:
        self._control.check()
        if self._assembly is None:
            raise HetpipeError("no stages are loaded; call load first")
        return self._assembly

    def _worker(self, member: str) -> int:
        if member not in self._index:
            raise HetpipeError(f"no member {member!r}; the crew has {', '.join(self._index)}")
        return self._index[member]

    def _patience_s(self) -> float:
        if self._longest_s is None:
            return FIRST_STEP_S
        return max(LEAST_PATIENCE_S, PATIENCE * self._longest_s)

    def _script(self, schedule: Schedule) -> tuple[int, Schedule | None]:
        """The schedule's number, and the schedule itself if the workers have not seen it."""
        if (known := self._scripts.get(id(schedule))) is not None:
            return known[0], None
        if len(self._scripts) >= say.SCRIPTS:
            self._scripts.pop(next(iter(self._scripts)))
        self._scripts[id(schedule)] = (self._serial, schedule)  # kept alive: ids are reused
        return self._serial, schedule

    @property
    def _workers(self) -> list[int]:
        """Those that have a stage, in the order of the rows."""
        return [self._index[member] for member in self._row_of]

    @property
    def _row_of(self) -> dict[str, int]:
        """The row of a schedule that a member does."""
        return {member: row for replicas, row in self._rows.items() for member in replicas}

    def _batch(
        self, assembly: Assembly, member: str, request: StepRequest, number: int
    ) -> say.Batch | None:
        """Mini-batch `number` of the stream as a member sees it."""
        if not request.samples and not request.number:
            return None
        own = [place for place in self._places(member) if assembly.shares.takes(place, number)]
        none = (0,) * len(request.samples)
        return say.Batch(
            self._serial,
            request.number,
            request.samples,
            {n: assembly.feeds_of((n, r), request.feeds, request.samples) for n, r in own},
            request.loss_tangents,
            request.lr,
            request.seed,
            request.grad_scale,
            request.clip,
            {n: request.lag.get(n, none) for n, _ in own},
            {n: request.ahead.get(n, none) for n, _ in own},
        )

    def _answer(self, news: say.News) -> None:
        """Tell the workers what follows from all their gradients or counts."""
        if isinstance(news, say.Counts):
            self._counts.append(sum(news.counts))
            shares = self._loaded().shares
            if not shares.in_turn and len(self._counts) < len(self._members[-1]):  # its rows each
                return
            total = sum(self._counts)
            self._counts.clear()
            if total == 0:
                raise HetpipeError("the counts of this mini-batch sum to 0: its loss has no mean")
            answer = say.Scale(news.serial, False, 1.0 / (total * self._loss_scale))
        else:
            self._squares.append(news.square)
            if len(self._squares) < len(self._row_of):
                return
            assert self._clip is not None
            factor = self._clip.factor(sum(self._squares))
            self._skipped = math.isnan(factor)
            answer = say.Scale(news.serial, True, factor)
            self._squares.clear()
        for worker in self._workers:
            self._fleet.send(worker, answer)

    def _result(self, reports: Sequence[say.StepReport], posted: _Posted) -> StepResult:
        begin_s = self._origin_s
        firsts = accumulate(posted.lanes, initial=0)
        spans = [
            Span(first + lane, Action(stage, Op(op), number), start_s - begin_s, end_s - begin_s)
            for first, report in zip(firsts, reports, strict=False)
            for lane, stage, op, number, start_s, end_s in report.spans
        ]
        names = [
            member if count == 1 else f"{member} lane {lane}"
            for member, count in zip(self._row_of, posted.lanes, strict=True)
            for lane in range(count)
        ]
        losses = _summed([r.losses for r in reports if r.losses is not None])
        counts = _summed([r.counts for r in reports if r.counts is not None])
        versions = {n: v for report in reports for n, v in report.versions.items()}
        live = {n: v for report in reports for n, v in report.live_versions.items()}
        held = {n: [r.memory[n] for r in reports if n in r.memory] for n in sorted(live)}
        spans.sort(key=lambda span: (span.worker, span.start_s))
        return StepResult(
            losses or (),
            counts,
            Timeline(tuple(names), tuple(spans), "measured"),
            tuple(versions[n] for n in sorted(versions)),
            tuple(live[n] for n in sorted(live)),
            tuple(max(in_flight for in_flight, _ in replicas) for replicas in held.values()),
            tuple(max(nbytes for _, nbytes in replicas) for replicas in held.values()),
            self._skipped,
        )


def _summed(parts: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
    """Per micro-batch, over the replicas; None if there are none."""
    return tuple(map(sum, zip(*parts, strict=True))) if parts else None
