"""Delivery: trains the mini-batches of steps and runs, and returns the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from hetpipe.crew.feeding import Hook, nothing
from hetpipe.errors import CheckpointError, HetpipeError, NotFiniteError, WorkerError
from hetpipe.pipeline.ahead import Ahead
from hetpipe.pipeline.autosave import Autosave
from hetpipe.pipeline.batches import copied
from hetpipe.pipeline.forwards import Evaluation, Forwards, Means, Metric, output_of
from hetpipe.pipeline.guard import Guard
from hetpipe.pipeline.rebalance import Rebalancer
from hetpipe.pipeline.remote import Remote, RemoteBatches
from hetpipe.pipeline.results import Result
from hetpipe.pipeline.survival import Survival
from hetpipe.pipeline.training import Training
from hetpipe.wire.wire import Content

if TYPE_CHECKING:
    from hetpipe.crew.request import StepRequest, StepResult
    from hetpipe.wire.messages import Array

T = TypeVar("T")


class Delivery:
    """Serves calls of `step` and `run`. Before a mini-batch, it moves layers if a move is due.

    Under a schedule without flushes only one run at a time can have results to come. Other calls
    may flush. Then they collect results, and keep them for this run, or drop them without a run.
    """

    def __init__(
        self,
        training: Training,
        guard: Guard,
        rebalancer: Rebalancer,
        autosave: Autosave,
        survival: Survival | None,
    ) -> None:
        self._training = training
        self._survival = survival
        if survival is not None:
            survival.on_resumed = self._repeat_forwards
        self._guard = guard
        self._rebalancer = rebalancer
        self._autosave = autosave
        self._results: deque[Result] = deque()
        self._run: object | None = None  # a token of the run that has results to come
        self._first = 0  # that run's first mini-batch; earlier ones are of a run that was left
        self._forwards: Forwards | None = None  # in eval mode, perhaps under way

    def call(self, name: str, work: Callable[[], T]) -> T:
        """Guard a public call, or a part of it, and return the result of `work`."""
        with self._guard(name):
            return self._survive(work)

    def _survive(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which is repeated after a loss that is survived."""
        return work() if self._survival is None else self._survival.run(work)

    def at_rest(self, name: str, work: Callable[[], T]) -> T:
        """Return the result of a public call that begins after all mini-batches are applied."""

        def rest() -> T:
            self.settle()
            return work()

        return self.call(name, rest)

    def settle(self) -> None:
        """Wait until all mini-batches that were handed in are collected and applied."""
        self._end_forwards()
        self._collect(self._training.under_way)
        self._first = 0  # no earlier run's mini-batch is under way, and a checkpoint may follow
        self._training.flush()

    def settle_anyway(self) -> None:
        """Wait like `settle`, and continue if losses or gradients are not finite."""
        while True:
            with suppress(NotFiniteError):  # its mini-batch is collected now
                return self.settle()

    def step(self, x: Any, y: Any) -> Result:
        """Train on one whole mini-batch."""
        with self._guard("step"):
            if not self._training.streams:
                result = self._survive(lambda: self._step(x, y))
            else:
                self._survive(self._prepare)
                self.at_rest("step", lambda: self._training.admit(x, y))
                result = self._survive(self._training.collect)
                self._survive(self.settle)
            self._survive(self._save_if_due)
            return result

    def _step(self, x: Any, y: Any, fed: int = 0, beside: Hook = nothing) -> Result:
        """Train on one mini-batch under a schedule that flushes."""
        self._prepare()
        return self._training.step(x, y, fed, beside)

    def run(self, batches: Iterable[tuple[Any, Any]] | Remote) -> Generator[Result, None, None]:
        """Train on mini-batches, and yield a result for each, in order; see `Pipeline.run`."""
        if isinstance(batches, Remote):
            yield from self._run_remote(batches)
            return
        if not self._training.streams:
            ahead = Ahead(self._training, batches)
            for x, y, fed in ahead:
                with self._guard("run"):
                    result = self._survive(partial(self._step, x, y, fed, ahead.read))
                    self._survive(self._save_if_due)
                yield result
            return
        token = object()
        try:
            with self._guard("run"):
                if self._run is not None:
                    raise HetpipeError(
                        "another run of this pipeline still has results: read the results, "
                        "or close() that run, before the next run begins"
                    )
                self._run, self._first = token, self._training.steps
            yield from self._results_of(batches)
        finally:
            if self._run is token:
                self._run = None
                self._results.clear()

    def _run_remote(self, remote: Remote) -> Iterator[Result]:
        """Train on the mini-batches that the workers read."""
        if self._survival is not None:
            raise HetpipeError(
                f"{remote} does not work with survive='auto', which keeps mini-batches in this "
                "process: read the data here, or leave survive out"
            )
        batches = RemoteBatches(self._training.setup, remote)
        try:
            while True:
                with self._guard("run"):
                    self._prepare()
                    if (present := next(batches, None)) is None:
                        return
                    result = self._training.step(present, None)
                    self._save_if_due()
                yield result
        finally:
            with suppress(WorkerError):  # the workers are gone
                batches.close()

    def _results_of(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[Result]:
        training, source = self._training, iter(batches)
        failure: Exception | None = None  # of the source, a batch that is not valid, or a write
        while True:
            try:
                x, y = next(source)
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            try:
                with self._guard("run"):
                    self._survive(self._prepare)
                    try:
                        fits = training.fits(x, y)
                    except HetpipeError as error:
                        failure = error
                        break
                    self._survive(partial(self._admit, x, y, fits))
                    if training.is_full and not self._results:
                        self._survive(self._collect)
                    self._survive(self._save_if_due)
            except CheckpointError as error:
                failure = error
                break
            if self._results:
                yield self._results.popleft()
        while self._results or training.under_way:
            if self._results:
                yield self._results.popleft()
            else:
                self.call("run", self._collect)
        if failure is not None:
            raise failure

    def predict(self, xs: Iterable[Any], ema: bool) -> Iterator[Any]:
        """Yield the model's output in eval mode for each x."""
        captured = self._training.setup.captured
        batches = ((captured.leaves(x), captured.example.length_of(x)) for x in map(copied, xs))
        forwards = Forwards(self._training, Content.INFERENCE, True, ema)
        for request, result, length in self._results_in_eval("predict", forwards, batches):
            yield output_of(captured, request, result, length)

    def evaluate(
        self, batches: Iterable[tuple[Any, Any]], metrics: Mapping[str, Metric], ema: bool
    ) -> Evaluation:
        """Return the mean loss and metrics of mini-batches in eval mode."""
        captured, means = self._training.setup.captured, Means(metrics)
        pairs = (
            (captured.leaves(x, y), (captured.example.length_of(x), y))
            for x, y in map(copied, batches)
        )
        with self._guard("evaluate"):
            forwards = Forwards(self._training, Content.EVALUATION, bool(metrics), ema)
        found = self._results_in_eval("evaluate", forwards, pairs)
        for number, (request, result, (length, y)) in enumerate(found):
            means.add(request, result, number)
            if metrics:
                output = output_of(captured, request, result, length)
                means.measure(output, y, sum(request.samples))
        return means.result()

    def _results_in_eval(
        self, call: str, forwards: Forwards, batches: Iterable[tuple[Mapping[str, Array], Any]]
    ) -> Iterator[tuple[StepRequest, StepResult, Any]]:
        """Yield a request, a result and the second value of each of `batches`, in order. The caller
        may make other calls between two results."""
        labels: deque[Any] = deque()
        for leaves, y in batches:
            with self._guard(call):
                if self._forwards is not forwards:
                    if self._survival is not None:
                        self._survive(partial(self._survival.rejoin, self.settle))
                    self.at_rest(call, forwards.begin)
                    self._forwards = forwards
                self.call(call, partial(forwards.admit, leaves))
                found = self.call(call, forwards.take)
            labels.append(y)
            if found is not None:
                yield *found, labels.popleft()
        while labels:
            found = self.call(call, partial(forwards.take, ends=True))
            assert found is not None
            yield *found, labels.popleft()

    def _end_forwards(self) -> None:
        if self._forwards is not None:
            self._forwards.end()
            self._forwards = None

    def _admit(self, x: Any, y: Any, fits: bool) -> None:
        if not fits:  # stages will be loaded, so no mini-batch may be under way
            self._collect(self._training.under_way)
        self._training.admit(x, y)

    def _prepare(self) -> None:
        """Move layers and take a snapshot if that is due, before the next mini-batch."""
        self._end_forwards()
        if self._rebalancer.due:
            self.settle()
            self._rebalancer.follow()
        if (survival := self._survival) is None:
            return
        survival.rejoin(self.settle)
        if survival.due:
            self.settle()
            survival.snapshot()

    def _save_if_due(self) -> None:
        if self._autosave.is_due(self._training):
            self.settle()
            self._autosave.save(self._training)

    def _repeat_forwards(self) -> None:
        """Begin the forwards under way again, on other stages."""
        if self._forwards is not None:
            self._forwards.repeat()

    def _collect(self, count: int = 1) -> None:
        """Collect results, and keep the ones that belong to the present run."""
        for _ in range(count):
            result = self._training.collect()
            if self._run is not None and result.index >= self._first:
                self._results.append(result)
