"""Stream: an endless asynchronous schedule, one mini-batch after another.

A schedule for a few mini-batches is generated once. After its start the schedule repeats, so every
later mini-batch adds the same actions with higher numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import PEERS, Action, Message, Op, Schedule
from hetpipe.schedule.complete import WEIGHTS, Tied
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.schedule.order import run_order
from hetpipe.schedule.rule import Rule, rule_of

ENTERS = (Op.RECV_FORWARD, Op.FORWARD)


@dataclass(frozen=True)
class Segment:
    """A part of every worker's row. Mini-batch b in `schedule` is mini-batch `first` + b of the
    stream."""

    schedule: Schedule
    first: int


class Stream:
    """The segments of an asynchronous schedule, and the numbers of updates between its passes.

    On workers that run mini-batch b, segment b begins with its first receive or forward. No action
    of a segment waits for a later segment. Raises `ScheduleError` if a schedule never repeats,
    and if replicas would average mini-batches of several micro-batches.
    """

    def __init__(
        self,
        schedule: str | Rule,
        stages: int,
        microbatches: int,
        in_flight: Sequence[int] | None = None,
        replicas: Sequence[int] = (),
        tied: Tied = (),
    ) -> None:
        self.rule = rule_of(schedule)
        self.microbatches = microbatches
        self.stages = stages
        self.replicas = tuple(replicas) or (1,) * stages
        self.per_update = self.rule.mini_batches_per_update(self.replicas)
        """The number of mini-batches that an update applies, by stage."""
        self._check_turns()
        self._in_flight, self._tied = in_flight, tied
        self._period = lcm(*self.replicas)
        # The mini-batches of two successive forwards of a worker differ by at most this number.
        most = max(self.replicas)
        deep = max(max_in_flight(self._full(most * (2 * stages + 2)))) * most
        self.start = max(-(-deep // microbatches), most) + 1
        count = 2 * self.start + 2 * self._period + 1
        self._sample = self._full(count)
        self._parts = _segments(self._sample, microbatches, count)
        self._check()
        # Kept, so that a repeated segment is the same object and is sent only once.
        self._schedules = list(zip(*self._parts, strict=True))
        self._updates = [self._count(stage) for stage in range(stages)]

    @property
    def sample(self) -> Schedule:
        """A whole schedule with its flush, long enough that its pattern repeats."""
        return self._sample

    @property
    def window(self) -> int:
        """How many mini-batches must be under way to keep all workers busy."""
        return self.start + self._period

    def segment(self, mini_batch: int) -> Segment:
        """Return the actions that `mini_batch` adds to the stream."""
        like = self._like(mini_batch)
        return Segment(self._schedules[like], mini_batch - like)

    def flush(self, mini_batches: int) -> Segment:
        """Return the remaining actions after the first `mini_batches` segments."""
        count = self._like(mini_batches - 1) + 1
        whole = self._full(count)
        rows = tuple(
            row[sum(map(len, part[:count])) :] for row, part in zip(whole, self._parts, strict=True)
        )
        return Segment(rows, mini_batches - count)

    def microbatches_of(self, mini_batch: int) -> range:
        """Return the numbers of the micro-batches of a mini-batch."""
        return range(mini_batch * self.microbatches, (mini_batch + 1) * self.microbatches)

    def applied(self, stage: int, microbatch: int) -> int:
        """Return how many updates `stage` makes before its forward of `microbatch`."""
        return self._look(stage, microbatch)[0]

    def ahead(self, stage: int, microbatch: int) -> int:
        """Return how many updates `stage` makes between forward and backward of `microbatch`."""
        forward, backward = self._look(stage, microbatch)
        return backward - forward

    def _like(self, mini_batch: int) -> int:
        """Return the first mini-batch with the same actions as `mini_batch`, apart from numbers."""
        later = max(mini_batch - self.start, 0)
        return mini_batch - later + later % self._period

    def _look(self, stage: int, microbatch: int) -> tuple[int, int]:
        mini_batch, place = divmod(microbatch, self.microbatches)
        like = self._like(mini_batch)
        before_forward, before_backward = self._updates[stage][like * self.microbatches + place]
        later = (mini_batch - like) // self.per_update[stage]
        return before_forward + later, before_backward + later

    def _full(self, mini_batches: int) -> Schedule:
        return generate(
            self.rule,
            self.stages,
            self.microbatches,
            in_flight=self._in_flight,
            tied=self._tied,
            mini_batches=mini_batches,
            replicas=self.replicas,
        )

    def _check_turns(self) -> None:
        """Raise `ScheduleError` if replicas would wait for each other between micro-batches."""
        if max(self.replicas) > 1 and self.microbatches > 1 and self.rule.averages:
            raise ScheduleError(
                f"{list(self.replicas)} replicas take mini-batches of {self.microbatches} "
                "micro-batches in turn, but each must have 1 micro-batch; use microbatches=1, or "
                "a synchronous schedule"
            )

    def _check(self) -> None:
        for worker, part in enumerate(self._parts):
            for turn in range(self.start, self.start + self._period):
                later = tuple(a.later(self._period, self.microbatches) for a in part[turn])
                if part[turn + self._period] != later:
                    raise ScheduleError(
                        f"{self.rule.name} does not repeat itself on worker {worker}: after "
                        f"{turn} mini-batches its order still changes, so it cannot run as a "
                        "stream"
                    )

    def _count(self, stage: int) -> dict[int, tuple[int, int]]:
        """Return, by micro-batch, how many updates a stage makes before its forward, and before its
        backward."""
        counts = {}
        for row in self._sample:
            updates, forwards = 0, {}
            for action in (a for a in row if a.stage == stage):
                if action.op is Op.FORWARD:
                    forwards[action.number] = updates
                elif action.op in WEIGHTS:
                    counts[action.number] = (forwards[action.number], updates)
                updates += action.op is Op.UPDATE
        return counts


def _segments(
    schedule: Schedule, microbatches: int, mini_batches: int
) -> list[list[tuple[Action, ...]]]:
    """Divide each row into segments: an action is in the first segment in which it can run.

    An action waits as in `run_order`, and until its mini-batch has entered the stream.
    """
    last = mini_batches - 1
    parts: list[list[list[Action]]] = [[[] for _ in range(mini_batches)] for _ in schedule]
    at = [0] * len(schedule)  # segment of each row's last action
    sent: dict[Message | None, int] = {}
    for rows, action in run_order(schedule):
        segment = max(at[row] for row in rows)
        if action.op in ENTERS:
            segment = max(segment, action.number // microbatches)
        elif action.op is Op.SEND_TIED_PARAM:  # the last one comes after all mini-batches
            segment = max(segment, min(action.number // PEERS, last))
        if action.op.is_receive:
            segment = max(segment, sent[action.message])
        if action.op.is_send:
            sent[action.message] = segment
        for row in rows:
            at[row] = segment
            parts[row][segment].append(action)
    return [[tuple(part) for part in parts_of] for parts_of in parts]
