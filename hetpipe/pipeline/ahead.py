"""Reads the mini-batches of a run, ahead of their use if their leaves must cross a network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hetpipe.crew.request import StepRequest
from hetpipe.errors import HetpipeError, WorkerError
from hetpipe.pipeline.batches import copied, sizes_of, slices

if TYPE_CHECKING:
    from typing_extensions import Self

    from hetpipe.pipeline.training import Training

Numbered = tuple[Any, Any, int]
"""A mini-batch, and the number of its leaves that were sent ahead; 0 if none were."""


class Ahead:
    """An iterator of mini-batches `(x, y, number)`, in the order of their source.

    While one mini-batch computes, `read` reads the next one and begins to send its leaves to other
    hosts. An error or end of the source takes effect when the next mini-batch is due.
    """

    def __init__(self, training: Training, batches: Iterable[tuple[Any, Any]]) -> None:
        self._training, self._source = training, iter(batches)
        self._kept: Numbered | BaseException | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Numbered:
        kept, self._kept = self._kept, None
        if isinstance(kept, BaseException):
            raise kept
        if kept is not None:
            return kept
        return *self._next(), 0

    def read(self) -> None:
        """Read the next mini-batch, unless it is read; on one host, do nothing. Raises only
        `KeyboardInterrupt`."""
        if not self._training.setup.crew.feeding.members or self._kept is not None:
            return
        try:
            x, y = self._next()
            self._kept = x, y, self._feed(x, y)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._kept = error

    def _next(self) -> tuple[Any, Any]:
        """Return the next mini-batch of the source. Several hosts get a copy: the source may use
        its tensors again for the mini-batch after it, which is read before this one is trained."""
        x, y = next(self._source)
        one_host = self._training.setup.crew.cluster.connections is None
        return (x, y) if one_host else copied((x, y))

    def _feed(self, x: Any, y: Any) -> int:
        training, setup = self._training, self._training.setup
        try:
            if not training.fits(x, y):
                return 0
        except HetpipeError:  # its step will raise it
            return 0
        leaves = setup.captured.leaves(x, y)
        samples = sizes_of(setup.captured, leaves, training.plan)
        feeds = tuple(slices(leaves, samples))
        try:
            return setup.crew.feed(StepRequest((), samples, feeds, (), rates={}, number=0))
        except WorkerError:  # the mini-batch under way raises it
            return 0
