"""Keeps the mini-batches that a worker has begun and not yet applied with all its stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from hetpipe.wire.messages import Apply, Batch, Step


class Position(NamedTuple):
    """The position of a micro-batch: the number of its mini-batch, that mini-batch, and the index
    in the mini-batch."""

    mini_batch: int
    batch: Batch
    place: int

    @property
    def samples(self) -> int:
        """The samples of the whole micro-batch, over all replicas."""
        return self.batch.samples[self.place]


class MiniBatches:
    """Mini-batches by number in the stream.

    Lanes read them at once; only the thread of the walk begins and drops them.
    """

    def __init__(self) -> None:
        self.microbatches = 1
        """Number of micro-batches in each mini-batch."""
        self._updates: dict[int, Apply] = {}
        self._firsts: dict[int, list[int]] = {}  # the index of each micro-batch's first sample
        self._forwarded: Counter[tuple[int, int]] = Counter()  # by stage and mini-batch
        self._applied: Counter[int] = Counter()  # stages

    def begin(self, step: Step) -> None:
        """Add the mini-batch, or the bare update, that comes with a part of a schedule."""
        self.microbatches = step.microbatches
        self._updates[step.begins] = step.batch
        if isinstance(step.batch, Batch):
            self._firsts[step.begins] = list(accumulate(step.batch.samples, initial=0))

    def update(self, number: int) -> Apply:
        """Return the update of a mini-batch."""
        return self._updates[number]

    def at(self, microbatch: int) -> Position:
        """Return the position of a micro-batch."""
        number, place = divmod(microbatch, self.microbatches)
        batch = self._updates[number]
        assert isinstance(batch, Batch)
        return Position(number, batch, place)

    def first_sample(self, position: Position) -> int:
        """Return the index in the mini-batch of a micro-batch's first sample."""
        return self._firsts[position.mini_batch][position.place]

    def forwarded(self, stage: int, position: Position) -> bool:
        """Count a stage's forward. Return whether it was the last one of the mini-batch."""
        key = stage, position.mini_batch
        self._forwarded[key] += 1
        is_last = self._forwarded[key] == len(position.batch.samples)
        if is_last:
            del self._forwarded[key]
        return is_last

    def applied(self, numbers: Iterable[int], stages: int) -> None:
        """Count one stage's update. Forget the mini-batches that all `stages` have applied."""
        for number in numbers:
            self._applied[number] += 1
            if self._applied[number] == stages:
                for table in (self._applied, self._updates, self._firsts):
                    table.pop(number, None)

    def clear(self) -> None:
        """Forget all mini-batches; none is under way any more."""
        for table in (self._applied, self._updates, self._firsts):
            table.clear()
