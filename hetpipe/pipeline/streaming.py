"""Streaming: mini-batches follow each other without flushes, several under way at once (station 1
of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest, StepResult, StreamPart, UpdateRequest
from hetpipe.schedule.complete import closing
from hetpipe.schedule.stream import Stream
from hetpipe.schedule.weights import WeightPolicy
from hetpipe.simulate.timeline import Timeline


class Streaming:
    """Hands mini-batches to a crew under an asynchronous schedule."""

    def __init__(self, crew: Crew, stream: Stream, policy: WeightPolicy) -> None:
        self._crew = crew
        self._stream = stream
        self._policy = policy
        self._closing = closing(stream.sample)
        self.admitted = 0  # since the last flush

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
        rest = UpdateRequest(segment.schedule, lr=0.0, number=0)
        self._crew.post(rest, self._part(segment.first, self.admitted))
        result = self._crew.collect()
        self.admitted = 0
        return updates, result

    def _part(self, first: int, begins: int) -> StreamPart:
        return StreamPart(first, begins, self._stream.microbatches, self._closing)

    def _aheads(self, stage: int, mini_batch: int) -> tuple[int, ...]:
        """Return, per micro-batch, how many updates ahead its forward predicts the weights."""
        stream, ahead = self._stream, self._policy.ahead
        return tuple(ahead(stream, stage, m) for m in stream.microbatches_of(mini_batch))
