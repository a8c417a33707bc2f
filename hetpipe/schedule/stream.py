"""Stream: an asynchronous schedule without an end, one mini-batch after another.

A schedule for a few mini-batches is generated once. Behind its start it repeats itself, so what
follows from the admission of any later mini-batch is the same with higher numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.generators import generate, max_in_flight

ENTERS = (Op.RECV_FORWARD, Op.FORWARD)
BACKWARDS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Segment:
    """A part of every worker's list. Its mini-batches are counted from `first`."""

    schedule: Schedule
    first: int


class Stream:
    """Segments of an asynchronous schedule, and which updates lie between its passes.

    Segment b begins on each worker with the first forward of mini-batch b. Raises `ScheduleError`
    for a schedule that never repeats itself.
    """

    def __init__(
        self, name: str, stages: int, microbatches: int, in_flight: Sequence[int] | None = None
    ) -> None:
        self.microbatches = microbatches
        self._question = (name, stages, microbatches)
        self._in_flight = in_flight
        # What a worker does with one pass and the next is at most so many mini-batches apart.
        self.start = -(-max(max_in_flight(self._full(2 * stages + 2))) // microbatches) + 1
        self._sample = self._full(2 * self.start + 3)
        self.stages = stages
        self._parts = [_segments(row, microbatches, 2 * self.start + 3) for row in self._sample]
        self._check()
        self._schedules = list(zip(*self._parts, strict=True))  # made once: each is sent once
        self._updates = [self._count(stage) for stage in range(stages)]

    @property
    def sample(self) -> Schedule:
        """The whole schedule of some mini-batches, more than the start takes, and its flush."""
        return self._sample

    def segment(self, mini_batch: int) -> Segment:
        """What follows from the admission of `mini_batch`."""
        first = max(mini_batch - self.start, 0)
        return Segment(self._schedules[mini_batch - first], first)

    def flush(self, mini_batches: int) -> Segment:
        """What is left behind the segments of so many mini-batches."""
        count = min(mini_batches, self.start + 1)
        whole = self._full(count)
        rows = tuple(
            row[sum(map(len, part[:count])) :] for row, part in zip(whole, self._parts, strict=True)
        )
        return Segment(rows, mini_batches - count)

    def applied(self, stage: int, microbatch: int) -> int:
        """Updates of `stage` before it forwards that micro-batch."""
        return self._look(stage, microbatch)[0]

    def ahead(self, stage: int, microbatch: int) -> int:
        """Updates of `stage` between the forward and the backward of that micro-batch."""
        forward, backward = self._look(stage, microbatch)
        return backward - forward

    def _look(self, stage: int, microbatch: int) -> tuple[int, int]:
        later = max(microbatch // self.microbatches - self.start, 0)
        found = self._updates[stage][microbatch - later * self.microbatches]
        return found[0] + later, found[1] + later

    def _full(self, mini_batches: int) -> Schedule:
        name, stages, microbatches = self._question
        return generate(
            name, stages, microbatches, in_flight=self._in_flight, mini_batches=mini_batches
        )

    def _check(self) -> None:
        for worker, part in enumerate(self._parts):
            steady, later = part[self.start], part[self.start + 1]
            if later != _shifted(steady, self.microbatches):
                raise ScheduleError(
                    f"{self._question[0]} does not repeat itself on worker {worker}: after "
                    f"{self.start} mini-batches its order still changes, so it cannot run as a "
                    "stream"
                )

    def _count(self, stage: int) -> dict[int, tuple[int, int]]:
        """Per micro-batch the updates of a stage before its forward, and before its backward."""
        updates, forwards, found = 0, {}, {}
        for action in (a for row in self._sample for a in row if a.stage == stage):
            if action.op is Op.FORWARD:
                forwards[action.number] = updates
            elif action.op in BACKWARDS:
                found[action.number] = (forwards[action.number], updates)
            updates += action.op is Op.UPDATE
        return found


def _segments(
    row: Sequence[Action], microbatches: int, mini_batches: int
) -> list[tuple[Action, ...]]:
    """A row, cut before the first forward of every mini-batch."""
    starts = []
    for mini_batch in range(mini_batches):
        number = mini_batch * microbatches
        starts.append(next(i for i, a in enumerate(row) if a.op in ENTERS and a.number == number))
    return [tuple(row[lo:hi]) for lo, hi in zip(starts, [*starts[1:], len(row)], strict=True)]


def _shifted(actions: Sequence[Action], microbatches: int) -> tuple[Action, ...]:
    """The same, one mini-batch later."""
    return tuple(
        replace(a, number=a.number + (1 if a.op is Op.UPDATE else microbatches)) for a in actions
    )
