"""Schedules of a plan, for one mini-batch or for a stream of mini-batches without flushes (station
1 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest, StepResult, StreamPart, UpdateRequest
from hetpipe.plan.plan import Plan
from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.complete import Tied, closing
from hetpipe.schedule.generators import generate
from hetpipe.schedule.lanes import row_workers
from hetpipe.schedule.requirements import HALVES
from hetpipe.schedule.rule import GPIPE_WITH_LOSS, ONE_F_ONE_B
from hetpipe.schedule.stream import Stream
from hetpipe.schedule.turns import places
from hetpipe.schedule.weights import WeightPolicy
from hetpipe.simulate.timeline import Timeline

ALL = frozenset(Op)
SUMMING = frozenset({Op.ALL_REDUCE, Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD})
UPDATING = frozenset({Op.UPDATE, Op.SEND_TIED_PARAM, Op.RECV_TIED_PARAM})


class Schedules:
    """The schedules of one plan. Each is made only once, because a crew recognises a schedule by
    the identity of the object, and sends no schedule twice."""

    def __init__(self, plan: Plan, tied: Tied = (), whole_loss: bool = False) -> None:
        self._plan = plan
        self._rule = GPIPE_WITH_LOSS if whole_loss else plan.rule
        self._tied = tied
        self._schedules: dict[tuple[int, frozenset[Op]], Schedule] = {}

    @property
    def halved(self) -> bool:
        """Whether the schedule has backwards in two halves."""
        return any(a.op in HALVES for row in self._whole(self._plan.microbatches) for a in row)

    def of(self, microbatches: int, ops: frozenset[Op]) -> Schedule:
        """Return the schedule of one mini-batch, with only the operations `ops`."""
        key = (microbatches, ops)
        if key not in self._schedules:
            in_flight = [min(stage.in_flight, microbatches) for stage in self._plan.stages]
            whole = self._whole(microbatches, in_flight, self._tied)
            rows = [tuple(a for a in row if a.op in ops) for row in whole]
            if not self._plan.rule.flushes:  # one row per replica, but only first replicas run
                turns = places(self._plan.replicas)
                self._schedules[key] = tuple(
                    rows[n] if replica == 0 else () for n, replica in turns
                )
            else:
                self._schedules[key] = tuple(_lanes(rows, row_workers(whole)))
        return self._schedules[key]

    def stream(self) -> Stream | None:
        """Return the stream of an asynchronous plan; None for a plan that flushes."""
        plan = self._plan
        if plan.rule.flushes:
            return None
        return Stream(
            plan.rule, len(plan.stages), plan.microbatches, plan.in_flight, plan.replicas,
            self._tied,
        )  # fmt: skip

    def _whole(
        self, microbatches: int, in_flight: Sequence[int] | None = None, tied: Tied = ()
    ) -> Schedule:
        plan, rule = self._plan, self._rule
        return generate(
            rule if rule.flushes else ONE_F_ONE_B,
            len(plan.stages),
            microbatches,
            in_flight=in_flight,
            tied=tied,
            workers=len(set(plan.devices)),
            replicas=plan.replicas if rule.flushes else (),
        )


def _lanes(rows: Sequence[tuple[Action, ...]], workers: Sequence[int]) -> list[tuple[Action, ...]]:
    """Return each worker's lanes that have actions, or one empty lane if no lane has actions."""
    kept: list[tuple[Action, ...]] = []
    for worker in sorted(set(workers)):
        lanes = [row for row, at in zip(rows, workers, strict=True) if at == worker]
        kept += [row for row in lanes if row] or lanes[:1]
    return kept


class Streaming:
    """Hands mini-batches to a crew under an asynchronous schedule."""

    def __init__(self, crew: Crew, stream: Stream, policy: WeightPolicy) -> None:
        self._crew = crew
        self._stream = stream
        self._policy = policy
        self._closing = closing(stream.sample)
        self.admitted = 0  # mini-batches since the last flush

    @property
    def window(self) -> int:
        """The number of mini-batches under way that keeps all workers busy."""
        return self._stream.window

    def admit(self, request: StepRequest) -> None:
        """Hand out a mini-batch, with the stream's schedule."""
        number = self.admitted
        segment = self._stream.segment(number)
        stages = range(self._stream.stages)
        request = replace(
            request,
            schedule=segment.schedule,
            lag={n: self._policy.lag(self._stream, n, number) for n in stages},
            ahead={n: self._aheads(n, number) for n in stages},
        )
        self._crew.post(request, self._part(segment.first, number))
        self.admitted += 1

    def collect(self) -> StepResult:
        """Return the result of the oldest mini-batch under way."""
        return self._crew.collect()

    def flush(self) -> tuple[list[int], StepResult]:
        """Apply all mini-batches that were handed out; all results must have been collected.

        Returns the updates of each stage since the last flush, and the result of the final updates.
        """
        updates = [-(-self.admitted // count) for count in self._stream.per_update]
        if self.admitted == 0:
            return updates, StepResult((), None, Timeline((), (), "measured"))
        segment = self._stream.flush(self.admitted)
        rest = UpdateRequest(segment.schedule, rates={}, number=0)
        self._crew.post(rest, self._part(segment.first, self.admitted))
        result = self._crew.collect()
        self.admitted = 0
        return updates, result

    def _part(self, first: int, begins: int) -> StreamPart:
        return StreamPart(first, begins, self._stream.microbatches, self._closing)

    def _aheads(self, stage: int, mini_batch: int) -> tuple[int, ...]:
        """Return how many updates ahead the forward of each micro-batch predicts the weights."""
        stream, ahead = self._stream, self._policy.ahead
        return tuple(ahead(stream, stage, m) for m in stream.microbatches_of(mini_batch))
