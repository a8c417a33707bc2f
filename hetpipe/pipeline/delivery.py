"""Delivery: trains the mini-batches of steps and runs, and returns the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hetpipe.errors import HetpipeError, NotFiniteError
from hetpipe.pipeline.guard import Guard
from hetpipe.pipeline.rebalance import Rebalancer
from hetpipe.pipeline.training import Result, Training


class Delivery:
    """Serves calls of `step` and `run`. Before a mini-batch, it moves layers if a move is due.

    Under a schedule without flushes only one run at a time can have results to come. Other calls
    may flush. Then they collect results, and keep them for this run, or drop them without a run.
    """

    def __init__(self, training: Training, guard: Guard, rebalancer: Rebalancer) -> None:
        self._training = training
        self._guard = guard
        self._rebalancer = rebalancer
        self._results: deque[Result] = deque()
        self._run: object | None = None  # a token of the run that has results to come

    @contextmanager
    def at_rest(self, call: str) -> Iterator[None]:
        """Guard a public call, and begin it after all mini-batches are applied."""
        with self._guard(call):
            self.settle()
            yield

    def settle(self) -> None:
        """Wait until all mini-batches that were handed in are collected and applied."""
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
            self._move_if_due()
            if not self._training.streams:
                return self._training.step(x, y)
            self.settle()
            self._training.admit(x, y)
            result = self._training.collect()
            self.settle()
            return result

    def run(self, batches: Iterable[tuple[Any, Any]]) -> Generator[Result, None, None]:
        """Train on mini-batches, and yield a result for each, in order; see `Pipeline.run`."""
        if not self._training.streams:
            for x, y in batches:
                with self._guard("run"):
                    self._move_if_due()
                    result = self._training.step(x, y)
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
            if self._results:
                yield self._results.popleft()
        while self._results or training.under_way:
            with self._guard("run"):
                if not self._results:
                    self._results.append(training.collect())
            yield self._results.popleft()
        if failure is not None:
            raise failure

    def _move_if_due(self) -> None:
        if self._rebalancer.due:
            self.settle()
            self._rebalancer.follow()

    def _collect_all(self) -> None:
        while self._training.under_way:
            result = self._training.collect()
            if self._run is not None:
                self._results.append(result)
