"""Training without flushes: mini-batches follow each other, several under way at once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hetpipe.crew.crew import Crew, Part, StepRequest, StepResult
from hetpipe.schedule.stream import Stream
from hetpipe.worker.runner import closing

if TYPE_CHECKING:
    pass


class Streaming:
    """Mini-batches on their way through a crew under an asynchronous schedule."""

    def __init__(self, crew: Crew, stream: Stream, policy: str) -> None:
        self._crew = crew
        self._stream = stream
        self._policy = policy
        self._closing = closing(stream.sample)
        self.admitted = 0  # since the last flush

    @property
    def window(self) -> int:
        """How many mini-batches may be handed out and not collected: enough to keep all busy."""
        return self._stream.window

    def admit(self, request: StepRequest) -> None:
        """Hand out a mini-batch; the request's own schedule does not count."""
        number = self.admitted
        segment = self._stream.segment(number)
        stages = range(self._stream.stages)
        request = replace(
            request,
            schedule=segment.schedule,
            lag={n: self._lags(n, number) for n in stages},
            ahead={n: self._aheads(n, number) for n in stages},
        )
        self._crew.post(request, self._part(segment.first, number))
        self.admitted += 1

    def collect(self) -> StepResult:
        """The result of the oldest mini-batch that is under way."""
        return self._crew.collect()

    def flush(self) -> list[int]:
        """Apply everything that was handed out; all results must have been collected.

        Returns the updates of each stage since the last flush.
        """
        updates = [-(-self.admitted // count) for count in self._stream.per_update]
        if self.admitted == 0:
            return updates
        segment = self._stream.flush(self.admitted)
        nothing = StepRequest(segment.schedule, (), (), (), lr=0.0, number=0)
        self._crew.post(nothing, self._part(segment.first, self.admitted))
        self._crew.collect()
        self.admitted = 0
        return updates

    def _part(self, first: int, begins: int) -> Part:
        return Part(first, begins, self._stream.microbatches, self._closing)

    def _lags(self, stage: int, mini_batch: int) -> tuple[int, ...]:
        """Per micro-batch how many updates older the version for its forward is than the last.

        Vertical sync: what the input stage has when the mini-batch enters (PipeDream, section 3.3),
        counted in mini-batches, so that stages with other numbers of replicas agree. 2BW: the
        version before the last, for all of a mini-batch.
        """
        microbatches, per_update = self._microbatches(mini_batch), self._stream.per_update
        applied = [self._stream.applied(stage, m) for m in microbatches]
        if self._policy == "vertical-sync":
            mini_batches = self._stream.applied(0, microbatches[0]) * per_update[0]
            wanted = mini_batches // per_update[stage]
        elif self._policy == "2bw":
            wanted = max(mini_batch // per_update[stage] - 1, 0)
        else:
            return (0,) * len(applied)
        return tuple(count - wanted for count in applied)

    def _aheads(self, stage: int, mini_batch: int) -> tuple[int, ...]:
        """Per micro-batch how many updates are predicted for its forward.

        PipeOptim: those until its backward. SpecTrain: those until it leaves the pipeline.
        """
        microbatches = self._microbatches(mini_batch)
        if self._policy == "spectrain":
            ahead = stage // 2 + self._stream.stages - stage - 1
            return (ahead,) * len(microbatches)
        return tuple(self._stream.ahead(stage, m) for m in microbatches)

    def _microbatches(self, mini_batch: int) -> range:
        count = self._stream.microbatches
        return range(mini_batch * count, (mini_batch + 1) * count)
