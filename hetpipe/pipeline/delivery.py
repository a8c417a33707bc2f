"""Delivery: hands the results of a stream to the run that waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from hetpipe.errors import HetpipeError
from hetpipe.pipeline.guard import OneThread
from hetpipe.pipeline.training import Result, Training


class Delivery:
    """The runs of a training under a schedule without flushes, one at a time.

    Other calls between two results may flush. The results that they collect wait here for the run;
    results that no run waits for are dropped.
    """

    def __init__(self, training: Training, one_thread: OneThread) -> None:
        self._training = training
        self._one_thread = one_thread
        self._results: deque[Result] = deque()
        self._running = False

    def settle(self) -> None:
        """Wait until no mini-batch is under way and all are applied."""
        self._collect_all()
        self._training.flush()

    def run(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[Result]:
        """Train on mini-batches; a result for each, in order.

        Raises `HetpipeError` while another run has results to come.
        """
        with self._one_thread("run"):
            if self._running:
                raise HetpipeError(
                    "another run of this pipeline has results to come: take them, or close() it, "
                    "before the next run begins"
                )
            self._running = True
        try:
            yield from self._results_of(batches)
        finally:
            self._running = False
            self._results.clear()

    def _results_of(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[Result]:
        training = self._training
        for x, y in batches:
            with self._one_thread("run"):
                if not training.fits(x, y):  # new stages: nothing may be under way
                    self._collect_all()
                training.admit(x, y)
                if training.is_full and not self._results:
                    self._results.append(training.collect())
            if self._results:
                yield self._results.popleft()
        while self._results or training.under_way:
            with self._one_thread("run"):
                if not self._results:
                    self._results.append(training.collect())
            yield self._results.popleft()

    def _collect_all(self) -> None:
        while self._training.under_way:
            result = self._training.collect()
            if self._running:
                self._results.append(result)
