"""Delivery: trains the mini-batches of steps and runs, and returns the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hetpipe.errors import HetpipeError, NotFiniteError, WorkerError
from hetpipe.pipeline.ahead import Ahead
from hetpipe.pipeline.autosave import Autosave
from hetpipe.pipeline.forwards import Evaluation, Forwards, Means, Metric, output_of
from hetpipe.pipeline.guard import Guard
from hetpipe.pipeline.rebalance import Rebalancer
from hetpipe.pipeline.remote import Remote, RemoteBatches
from hetpipe.pipeline.results import Result
from hetpipe.pipeline.training import Training
from hetpipe.wire.wire import Content

if TYPE_CHECKING:
    from hetpipe.crew.request import StepRequest, StepResult
    from hetpipe.wire.messages import Array


class Delivery:
    """Serves calls of `step` and `run`. Before a mini-batch, it moves layers if a move is due.

    Under a schedule without flushes only one run at a time can have results to come. Other calls
    may flush. Then they collect results, and keep them for this run, or drop them without a run.
    """

    def __init__(
        self, training: Training, guard: Guard, rebalancer: Rebalancer, autosave: Autosave
    ) -> None:
        self._training = training
        self._guard = guard
        self._rebalancer = rebalancer
        self._autosave = autosave
        self._results: deque[Result] = deque()
        self._run: object | None = None  # a token of the run that has results to come
        self._forwards: Forwards | None = None  # in eval mode, perhaps under way

    @contextmanager
    def at_rest(self, call: str) -> Iterator[None]:
        """Guard a public call, and begin it after all mini-batches are applied."""
        with self._guard(call):
            self.settle()
            yield

    def settle(self) -> None:
        """Wait until all mini-batches that were handed in are collected and applied."""
        self._end_forwards()
        self._collect_all()
        self._training.flush()

    def settle_anyway(self) -> None:
        """Wait like `settle`, and continue if losses or gradients are not finite."""
        while True:
            try:
                self.settle()
            except NotFiniteError:  # its mini-batch is collected now
                continue
            return

    def step(self, x: Any, y: Any) -> Result:
        """Train on one whole mini-batch."""
        with self._guard("step"):
            self._end_forwards()
            self._move_if_due()
            if self._training.streams:
                self.settle()
                self._training.admit(x, y)
                result = self._training.collect()
                self.settle()
            else:
                result = self._training.step(x, y)
            self._save_if_due()
            return result

    def run(self, batches: Iterable[tuple[Any, Any]] | Remote) -> Generator[Result, None, None]:
        """Train on mini-batches, and yield a result for each, in order; see `Pipeline.run`."""
        if isinstance(batches, Remote):
            yield from self._run_remote(batches)
            return
        if not self._training.streams:
            ahead = Ahead(self._training, batches)
            for x, y, fed in ahead:
                with self._guard("run"):
                    self._end_forwards()
                    self._move_if_due()
                    result = self._training.step(x, y, fed, ahead.read)
                    self._save_if_due()
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
                self._run = token
            yield from self._results_of(batches)
        finally:
            if self._run is token:
                self._run = None
                self._results.clear()

    def _run_remote(self, remote: Remote) -> Iterator[Result]:
        """Train on the mini-batches that the workers read."""
        batches = RemoteBatches(self._training.setup, remote)
        try:
            while True:
                with self._guard("run"):
                    self._end_forwards()
                    self._move_if_due()
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
        failure: Exception | None = None  # an error of the source, or of a batch that is not valid
        while True:
            try:
                x, y = next(source)
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            with self._guard("run"):
                self._end_forwards()
                self._move_if_due()
                try:
                    fits = training.fits(x, y)
                except HetpipeError as error:
                    failure = error
                    break
                if not fits:  # stages will be loaded, so no mini-batch may be under way
                    self._collect_all()
                training.admit(x, y)
                if training.is_full and not self._results:
                    self._results.append(training.collect())
                self._save_if_due()
            if self._results:
                yield self._results.popleft()
        while self._results or training.under_way:
            with self._guard("run"):
                if not self._results:
                    self._results.append(training.collect())
            yield self._results.popleft()
        if failure is not None:
            raise failure

    def predict(self, xs: Iterable[Any], ema: bool) -> Iterator[Any]:
        """Yield the model's output in eval mode for each x."""
        captured = self._training.setup.captured
        batches = ((captured.leaves(x), captured.example.length_of(x)) for x in xs)
        forwards = Forwards(self._training, Content.INFERENCE, True, ema)
        for request, result, length in self._results_in_eval("predict", forwards, batches):
            yield output_of(captured, request, result, length)

    def evaluate(
        self, batches: Iterable[tuple[Any, Any]], metrics: Mapping[str, Metric], ema: bool
    ) -> Evaluation:
        """Return the mean loss and metrics of mini-batches in eval mode."""
        captured, means = self._training.setup.captured, Means(metrics)
        pairs = ((captured.leaves(x, y), (captured.example.length_of(x), y)) for x, y in batches)
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
        """Yield a request, a result and the second value of each of `batches`, in order.

        The caller may make other calls between two results.
        """
        labels: deque[Any] = deque()
        for leaves, y in batches:
            with self._guard(call):
                if self._forwards is not forwards:
                    self.settle()
                    forwards.begin()
                    self._forwards = forwards
                forwards.admit(leaves)
                found = forwards.take()
            labels.append(y)
            if found is not None:
                yield *found, labels.popleft()
        while labels:
            with self._guard(call):
                found = forwards.take(ends=True)
            assert found is not None
            yield *found, labels.popleft()

    def _end_forwards(self) -> None:
        if self._forwards is not None:
            self._forwards.end()
            self._forwards = None

    def _move_if_due(self) -> None:
        if self._rebalancer.due:
            self.settle()
            self._rebalancer.follow()

    def _save_if_due(self) -> None:
        if self._autosave.is_due(self._training):
            self.settle()
            self._autosave.save(self._training)

    def _collect_all(self) -> None:
        while self._training.under_way:
            result = self._training.collect()
            if self._run is not None:
                self._results.append(result)
