"""Crew: started workers, one per member of a cluster, that run stages and schedules."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from hetpipe.capture.program import StageGraphs
from hetpipe.cluster.cluster import Cluster, Member
from hetpipe.cost.table import Label
from hetpipe.crew.answers import Answers, Posted, result_of
from hetpipe.crew.assembly import Assembly
from hetpipe.crew.control import Patience
from hetpipe.crew.fleet import Fleet
from hetpipe.crew.handout import Scripts, batch_of
from hetpipe.crew.launcher import launch
from hetpipe.crew.placement import Placement
from hetpipe.crew.request import Apply, Part, Request, StepRequest, StepResult
from hetpipe.errors import HetpipeError
from hetpipe.schedule.closing import closing
from hetpipe.schedule.lanes import worker_rows
from hetpipe.sdk.info import DeviceInfo
from hetpipe.wire import messages as say
from hetpipe.wire.messages import Array
from hetpipe.wire.pieces import streams
from hetpipe.wire.shares import Shares


class Crew:
    """Workers with their devices open. A context manager; no process outlives `close`.

    The first failure of a worker ends all: it is raised as `WorkerError`, then and ever after.
    """

    def __init__(self, cluster: Cluster, fleet: Fleet, start_timeout_s: float) -> None:
        self._fleet = fleet
        self._control = fleet.control
        self._opened: dict[str, DeviceInfo] | None = None
        self._close = weakref.finalize(self, fleet.close)
        self.cluster = cluster
        self._index = {member.id: i for i, member in enumerate(cluster.members)}
        self._assembly: Assembly | None = None
        self._placement = Placement((), False)
        self._scripts = Scripts()
        self._posted: deque[Posted] = deque()  # requests under way
        self._answers: Answers  # for the latest request
        self.load_count = 0
        """The number of loads so far: it tells a pipeline whether its stages are still loaded."""
        self._serial = 0
        self._origin_s = 0.0  # of timelines: the begin of the step or stream
        self._patience = Patience()
        self._start_timeout_s = start_timeout_s

    @classmethod
    def start(
        cls,
        cluster: Cluster,
        *,
        heartbeat_s: float = 1.0,
        silence_s: float = 8.0,
        start_timeout_s: float = 120.0,
        wait: bool = True,
    ) -> Crew:
        """Start one worker per member and open its device.

        Without `wait` the first use waits for that. A worker that gives no sign of life for
        `silence_s` is taken for dead. Raises `BackendError` for a missing device, `HetpipeError`
        for a backend that no process can import, `WorkerError` if a worker does not come up.
        """
        fleet = launch(cluster, heartbeat_s, silence_s, start_timeout_s)
        crew = cls(cluster, fleet, start_timeout_s)
        if wait:
            crew._await_devices()
        return crew

    @property
    def infos(self) -> dict[str, DeviceInfo]:
        """The open devices, by member."""
        self._await_devices()
        assert self._opened is not None
        return self._opened

    @property
    def label(self) -> Label:
        """The label of speeds that are measured with all members."""
        emulated = any(self.label_of(m) == "emulated" for m in self.cluster.members)
        return "emulated" if emulated or self.cluster.links else "measured"

    def label_of(self, member: Member) -> Label:
        """The label of speeds of this member."""
        emulated = member.speed != 1.0 or self.infos[member.id].capabilities.emulated
        return "emulated" if emulated else "measured"

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

        Gradients start at zero, optimizer state at `state_init(shape, dtype)`. A member that occurs
        again has several stages. A stage with several members and graphs has replicas, which divide
        a micro-batch by their `shares` (default equal); `sizes` are the samples of whole
        micro-batches. A schedule's rows are the members in the order of their first stage; the
        replicas of a stage share a row, unless they take turns. Replaces all stages loaded before.
        Raises `HetpipeError` if stages, members and values do not fit together.
        """
        graphs = [[stage] if isinstance(stage, StageGraphs) else list(stage) for stage in stages]
        shares = shares or Shares(tuple((1.0,) * len(replicas) for replicas in graphs))
        placement = Placement(members, shares.in_turn)
        if list(map(len, graphs)) != list(map(len, placement.members)):
            raise HetpipeError(
                f"{len(graphs)} stages need a member each, and one per replica, got "
                f"{len(members)}: {list(members)}"
            )
        assembly = Assembly(graphs, values, shares, sizes)
        for member in placement.row_of:
            self._worker(member)
        self._assembly, self._placement = None, placement
        self.load_count += 1
        with self._guarded():
            streaming = {member for member, info in self.infos.items() if streams(info)}
            plugged = assembly.plug(self.cluster, placement.members, self._index, streaming)
            for member, (ends, fds) in plugged.items():
                own = tuple(
                    say.StageLoad(graphs[n][r], r, assembly.values_of(graphs[n][r]))
                    for n, r in placement.replicas_of(member)
                )
                with fds:
                    message = say.Load(own, keep, state_init, ends, shares)
                    self._fleet.send(self._index[member], message, fds.numbers)
            self._control.gather(self._workers)
        self._assembly, self._patience = assembly, Patience()
        self._scripts.clear()
        self._posted.clear()

    def step(self, request: Request, timeout_s: float | None = None) -> StepResult:
        """Run one mini-batch to its end.

        `timeout_s` is the time for which nothing may move; default 20 times the longest step so
        far, at least 60 s. Raises `WorkerError`; `HetpipeError` before anything runs if the request
        does not fit the stages.
        """
        self.post(request)
        return self.collect(timeout_s)

    def post(self, request: Request, part: Part | None = None) -> None:
        """Hand out a mini-batch, without waiting for it (station 2 of
        docs/life-of-a-micro-batch.md).

        Workers may go on from a `part` of a stream before it is done; without a part they drain it.
        """
        assembly = self._loaded()
        microbatches, evaluates = 1, False
        assembly.check_rows(request.schedule, self._placement.rows)
        if isinstance(request, StepRequest):
            assembly.check(request.samples, request.feeds, request.loss_tangents)
            if request.grad_scale is None and not assembly.has_count:
                raise HetpipeError("grad_scale is None, and the loss has no count to make it from")
            microbatches, evaluates = len(request.samples), request.evaluates
        self._serial += 1
        # A caller's own schedule may leave out micro-batches; it still has one mini-batch.
        place = part or Part(0, 0, microbatches, closing(request.schedule))
        with self._guarded():
            now_s = time.monotonic()
            if part is None or part.begins == 0:
                self._origin_s = now_s
            rows = worker_rows(request.schedule)
            lanes = {member: rows[row] for member, row in self._placement.row_of.items()}
            self._posted.append(Posted(now_s, {member: len(own) for member, own in lanes.items()}))
            self._answers = Answers(request, assembly.reporters, len(lanes))
            script, schedule = self._scripts.send(request.schedule, self._serial)
            for member, own in lanes.items():
                active = self._placement.active(member, assembly.shares, place.begins)
                batch = batch_of(request, self._serial, active, assembly)
                message = say.Step(
                    self._serial, script, schedule, own, place.closing, place.first,
                    place.microbatches, place.begins, batch,
                    drain=part is None or isinstance(request, Apply), evaluates=evaluates,
                )  # fmt: skip
                self._fleet.send(self._index[member], message)

    def collect(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the oldest mini-batch under way (station 16 of
        docs/life-of-a-micro-batch.md)."""
        patience_s = timeout_s if timeout_s is not None else self._patience.limit_s
        with self._guarded():
            posted = self._posted.popleft()
            reports = self._control.gather(self._workers, patience_s, self._answer)
            self._patience.saw(time.monotonic() - posted.begin_s)
        return result_of(reports, posted, self._origin_s, self._answers.skipped)

    @property
    def under_way(self) -> int:
        """The number of mini-batches that were handed out and not collected."""
        return len(self._posted)

    def read(
        self, role: str, names: Sequence[str] | None = None, replica: int = 0
    ) -> dict[str, Array]:
        """Present values of PARAM, BUFFER, STATE or GRAD slots, by name; default all.

        A value that several stages have (tied weights) comes from its owner, the first of them; a
        value of a stage with replicas from that `replica`.
        """
        assembly = self._loaded()
        owners = assembly.owners(role, names)
        merged: dict[str, Array] = {}
        with self._guarded():
            for stage, own in owners.items():
                worker = self._index[self._placement.members[stage][replica]]
                self._fleet.send(worker, say.Read(stage, role, tuple(own)))
                merged.update(self._control.gather([worker])[0])
        order = names if names is not None else [name for own in owners.values() for name in own]
        return {name: merged[name] for name in order}

    def write(self, role: str, values: Mapping[str, Array]) -> None:
        """Replace values of PARAM, BUFFER, STATE or GRAD slots, on every stage that has them.

        A tied gradient is a sum over stages: its owner gets the value, the others zero.
        """
        assembly = self._loaded()
        shares = assembly.by_stage(role, values)
        with self._guarded():
            for stage, share in shares.items():
                for member in self._placement.members[stage]:
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
        """An error in a conversation with the workers ends them, since they are out of step."""
        try:
            self._await_devices()
            self._control.check()
            yield
        except BaseException:
            self.close()
            raise

    def _await_devices(self) -> None:
        """Receive the first reply of every worker, once."""
        if self._opened is None:
            try:
                opened = self._control.gather(list(self._index.values()), self._start_timeout_s)
            except BaseException:
                self.close()
                raise
            self._opened = dict(zip(self._index, opened, strict=True))

    def _loaded(self) -> Assembly:
        self._control.check()
        if self._assembly is None:
            raise HetpipeError("no stages are loaded; call load first")
        return self._assembly

    def _worker(self, member: str) -> int:
        if member not in self._index:
            raise HetpipeError(f"no member {member!r}; the crew has {', '.join(self._index)}")
        return self._index[member]

    @property
    def _workers(self) -> list[int]:
        """The workers that have a stage, in the order of the rows."""
        return [self._index[member] for member in self._placement.row_of]

    def _answer(self, news: say.News) -> None:
        """Answer the workers' losses or norms, once all have reported (station 13)."""
        if (scale := self._answers.to(news)) is not None:
            for worker in self._workers:
                self._fleet.send(worker, scale)
