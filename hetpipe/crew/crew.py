"""A crew: started workers, one per member of a cluster, that run stages and schedules."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hetpipe.capture.program import BUFFER, PARAM, StageGraphs
from hetpipe.checkpoint.tensors import Tensors
from hetpipe.cluster.cluster import Cluster
from hetpipe.crew.answers import Answers, Posted, result_of
from hetpipe.crew.assembly import Assembly
from hetpipe.crew.control import Patience
from hetpipe.crew.feeding import Hook, nothing
from hetpipe.crew.groups import meeting_places
from hetpipe.crew.launcher import Launched
from hetpipe.crew.loaded import Loaded
from hetpipe.crew.request import Request, StepRequest, StepResult, StreamPart, UpdateRequest
from hetpipe.crew.stage_members import StageMembers, stage_moves, travelling_names
from hetpipe.errors import HetpipeError, UnsupportedOperatorError
from hetpipe.schedule.action import Schedule
from hetpipe.schedule.complete import closing
from hetpipe.schedule.lanes import worker_rows
from hetpipe.wire import messages as say
from hetpipe.wire.messages import Array
from hetpipe.wire.shares import Replica, Shares
from hetpipe.wire.wire import Content

Stages = StageGraphs | Sequence[StageGraphs]
"""A stage, or its replicas."""
Members = str | Sequence[str]
"""The member of a stage, or the members of its replicas."""


class Scripts:
    """The schedules that workers have, by number. Both ends forget the oldest schedule first."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, Schedule]] = {}  # by `id`; kept alive, so ids stay unique

    def send(self, schedule: Schedule, serial: int) -> tuple[int, Schedule | None]:
        """Return the schedule's number, and the schedule itself if the workers lack it."""
        if (sent := self._sent.get(id(schedule))) is not None:
            return sent[0], None
        if len(self._sent) >= say.SCRIPTS:
            self._sent.pop(next(iter(self._sent)))
        self._sent[id(schedule)] = (serial, schedule)
        return serial, schedule

    def clear(self) -> None:
        self._sent.clear()


class Crew(Loaded):
    """Workers with their devices open, and the stages of the workers."""

    def __init__(self, cluster: Cluster, launched: Launched, start_timeout_s: float) -> None:
        self._scripts = Scripts()
        self._posted: deque[Posted] = deque()  # requests under way
        self._answers: Answers  # for the latest request
        self._serial = 0
        self._origin_s = 0.0  # time 0 of timelines: the start of the step or stream
        self._patience = Patience()
        self.pass_limit_s: float | None = None  # after which a pass counts as stuck; None: never
        super().__init__(cluster, launched, start_timeout_s)

    def load(
        self,
        stages: Sequence[Stages],
        members: Sequence[Members],
        values: Mapping[str, Array],
        state_init: Callable[..., Array] = np.zeros,
        keep: say.Keep = say.Keep(),  # noqa: B008 - frozen
        shares: Shares | None = None,
        sizes: Collection[int] = (),
    ) -> None:
        """Give stage n to `members[n]`: compile all programs, and upload parameters and buffers.

        Gradients start at zero, optimizer state at `state_init(shape, dtype)`. A member may have
        several stages. A stage with several members and graphs has replicas, which divide a
        micro-batch by their `shares` (default equal); `sizes` are the samples of whole
        micro-batches. A schedule's rows are the members in the order of their first stage; the
        replicas of a stage share a row, unless they take turns. The new stages replace all stages
        loaded before. Raises `HetpipeError`, and nothing changes, if stages, members and values do
        not fit together, or a device lacks an operator.
        """
        assembly, placement = _assemble(stages, members, values, shares, sizes)
        loads = {
            Replica(n, r): say.StageLoad(stage, r)
            for n, replicas in enumerate(assembly.stages)
            for r, stage in enumerate(replicas)
        }
        self._load(assembly, placement, loads, keep, state_init)
        for role in (PARAM, BUFFER):
            self.write(role, Tensors.of(values).only(self.slots(role)))

    def move(
        self,
        stages: Sequence[Stages],
        members: Sequence[Members],
        keep: say.Keep,
        sizes: Collection[int] = (),
    ) -> None:
        """Replace the stages by other stages of the same model, or move them, while no step runs.

        Values stay on members that still need them, and other values travel. Gradients do not
        travel, so the gradients of a stage that moves must be zero. A stage stays compiled if its
        member has it already. Raises `HetpipeError` for replicas and members of several stages.
        """
        before, placed = self._loaded(), self._placement.members
        assembly, placement = _assemble(stages, members, None, None, sizes)
        moves = stage_moves(before, placed, assembly, placement.members)
        values = {role: self.read(role, names) for role, names in travelling_names(moves).items()}
        loads = {
            Replica(n, 0): say.StageLoad(assembly.stages[n][0], 0, move.held)
            for n, move in enumerate(moves)
            if not move.stays
        }
        self._load(assembly, placement, loads, keep, np.zeros)
        for role, named in values.items():
            self.write(role, named)

    def _load(
        self,
        assembly: Assembly,
        placement: StageMembers,
        loads: Mapping[Replica, say.StageLoad],
        keep: say.Keep,
        state_init: Callable[..., Array],
    ) -> None:
        """Load the stages of these replicas; all other stages stay. Raises
        `UnsupportedOperatorError`, before anything changes, if a device cannot run its stage."""
        workers = [self._worker(member) for member in placement.row_of]
        meeting = meeting_places(self.cluster, placement.members, self.infos)
        with self._conversation(), meeting as folders:
            places = placement.members, self._index, self.infos
            wires = assembly.wire_ends(self.cluster, *places, self._fleet.route)
            for member, ends in wires.items():
                replicas = placement.replicas_of(member)
                stage_loads = tuple(loads[replica] for replica in replicas if replica in loads)
                stay = tuple(replica.stage for replica in replicas if replica not in loads)
                self._fleet.connect(self._index[member], ends)
                message = say.Load(stage_loads, keep, state_init, assembly.shares, stay, folders)
                self._fleet.send(self._index[member], message)
            answers = dict(zip(placement.row_of, self._control.gather(workers), strict=True))
            refused = [
                (member, *answer)
                for member, reasons in answers.items()
                for answer in reasons.items()
            ]
            if not refused:
                self._assembly, self._placement = None, placement
                self.load_count += 1
            for worker in workers:
                self._fleet.send(worker, say.Begin(not refused))
            self._control.gather(workers)
        _check_refused(refused)
        self._assembly, self._patience = assembly, Patience()
        self._scripts.clear()
        self._posted.clear()

    def step(
        self, request: Request, timeout_s: float | None = None, beside: Hook = nothing
    ) -> StepResult:
        """Run one mini-batch to its end. The user's thread calls `beside` before it waits.

        `timeout_s` limits the time in which nothing moves; by default `pass_limit_s` during passes,
        else `Patience.limit_s`. Raises `WorkerError`; `HetpipeError` for a request that is wrong.
        """
        self.post(request)
        with self._conversation():
            beside()
        return self.collect(timeout_s)

    def post(self, request: Request, part: StreamPart | None = None) -> None:
        """Hand out a mini-batch, without waiting for it (station 2).

        With a `part` of a stream, workers may begin the next part before this part is done. Without
        a part, workers wait at the end until all messages are sent.
        """
        assembly = self._loaded()
        microbatches, forwards, keeps_output = 1, Content.FORWARD, False
        assembly.check_rows(request.schedule, self._placement.rows)
        if isinstance(request, StepRequest):
            assembly.check(request)
            counted = assembly.has_count or request.whole_loss is not None
            if request.grad_scale is None and not counted:
                raise HetpipeError("grad_scale is None, but the loss has no count: give it a value")
            microbatches, forwards = len(request.samples), request.forwards
            keeps_output = request.keeps_output or request.whole_loss is not None
        self._serial += 1
        # A custom schedule that leaves out micro-batches is still one mini-batch.
        place = part or StreamPart(0, 0, microbatches, closing(request.schedule))
        with self._conversation():
            now_s = time.monotonic()
            if part is None or part.begins == 0:
                self._origin_s = now_s
            rows = worker_rows(request.schedule)
            lanes = {member: rows[row] for member, row in self._placement.row_of.items()}
            counts = {member: len(member_rows) for member, member_rows in lanes.items()}
            self._posted.append(Posted(now_s, counts))
            self._answers = Answers(request, assembly.reporters, len(lanes))
            script, schedule = self._scripts.send(request.schedule, self._serial)
            fed = self.feeding.fed(request, self.load_count)
            for member, member_rows in lanes.items():
                active = self._placement.active(member, assembly.shares, place.begins)
                batch = assembly.batch(request, self._serial, active, member in fed)
                message = say.Step(
                    self._serial, script, schedule, member_rows,
                    frozenset() if schedule is None else place.closing, place.first,
                    place.microbatches, place.begins, batch,
                    drain=part is None or isinstance(request, UpdateRequest), forwards=forwards,
                    keeps_output=keeps_output,
                )  # fmt: skip
                self._fleet.send(self._index[member], message)

    def feed(self, request: StepRequest) -> int:
        """Begin to send the leaves of a later mini-batch; see `Feeding.begin`."""
        assembly, replicas = self._loaded(), self._placement.replicas_of
        members = self.feeding.members.intersection(self._placement.row_of)
        feeds = {member: assembly.feeds(request, replicas(member)) for member in members}
        return self.feeding.begin(feeds, self.load_count)

    @property
    def readers(self) -> list[str]:
        """The members whose stages read leaves of mini-batches in training."""
        assembly, replicas = self._loaded(), self._placement.replicas_of
        return [m for m in self._placement.row_of if any(map(assembly.reads, replicas(m)))]

    def collect(self, timeout_s: float | None = None) -> StepResult:
        """Wait for the oldest mini-batch under way (station 16)."""
        limits_s = self._patience.limit_s, self.pass_limit_s
        patience_s, pass_limit_s = limits_s if timeout_s is None else (timeout_s, timeout_s)
        with self._conversation():
            posted = self._posted.popleft()
            reports = self._control.gather(self._workers, patience_s, self._answer, pass_limit_s)
            self._patience.add(time.monotonic() - posted.begin_s)
        return result_of(reports, posted, self._origin_s, self._answers, self.clock_error_s)

    @property
    def under_way(self) -> int:
        """The number of mini-batches that were handed out and are not collected."""
        return len(self._posted)

    @property
    def _workers(self) -> list[int]:
        """The workers that have a stage, in the order of the rows."""
        return [self._index[member] for member in self._placement.row_of]

    def _answer(self, news: say.News) -> None:
        """Answer the workers' losses or norms, once all have reported (station 13)."""
        if (scale := self._answers.to(news)) is not None:
            request, assembly = self._answers.feeds(news), self._loaded()
            for member in self._placement.row_of:
                feeds = assembly.late_feeds(self._placement.replicas_of(member), request)
                self._fleet.send(self._index[member], replace(scale, feeds=feeds))


def _check_refused(refused: Sequence[tuple[str, int, str]]) -> None:
    """Raise `UnsupportedOperatorError` for the first stage that a member cannot run."""
    for member, stage, reason in refused:
        raise UnsupportedOperatorError(
            f"stage {stage} on {member}: {reason}; give that layer to another device (cuts), "
            "or leave this device out"
        )


def _assemble(
    stages: Sequence[Stages],
    members: Sequence[Members],
    values: Mapping[str, Array] | None,
    shares: Shares | None,
    sizes: Collection[int],
) -> tuple[Assembly, StageMembers]:
    """Check and place stages. Raises `HetpipeError` if stages, members and values do not fit."""
    graphs = [[stage] if isinstance(stage, StageGraphs) else list(stage) for stage in stages]
    shares = shares or Shares(tuple((1.0,) * len(replicas) for replicas in graphs))
    placement = StageMembers(members, shares.in_turn)
    if list(map(len, graphs)) != list(map(len, placement.members)):
        raise HetpipeError(
            f"every stage needs one member per replica: {[len(replicas) for replicas in graphs]} "
            f"members, not {list(members)}"
        )
    return Assembly(graphs, values, shares, sizes), placement
