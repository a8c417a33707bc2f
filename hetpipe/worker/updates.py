"""Keeps the mini-batches that a worker has begun and not yet applied, and scales, clips and applies
their gradients (stations 12 to 14 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from hetpipe.schedule.action import Action
from hetpipe.schedule.turns import round_of
from hetpipe.wire.messages import Apply, Batch, Step
from hetpipe.wire.shares import Replica, Shares
from hetpipe.worker.emulation import Moment
from hetpipe.worker.exchange import Exchange
from hetpipe.worker.stage import Stage


class Position(NamedTuple):
    """The position of a micro-batch: index `place` of `batch`, which is mini-batch `mini_batch` of
    the stream. `samples` counts the samples of all replicas."""

    mini_batch: int
    batch: Batch
    place: int
    samples: int


class MiniBatches:
    """Mini-batches by number in the stream. A mini-batch is added before the lanes start, and
    dropped after its last update; lanes may read it at the same time."""

    def __init__(self) -> None:
        self.microbatches = 1  # in each mini-batch
        self._updates: dict[int, Apply] = {}
        self._firsts: dict[int, list[int]] = {}  # the index of each micro-batch's first sample
        self._forwarded: Counter[tuple[int, int]] = Counter()  # by stage and mini-batch
        self._applied: Counter[int] = Counter()  # by mini-batch: number of stages that applied it

    def begin(self, step: Step) -> None:
        """Add the mini-batch, or the bare update, that comes with a part of a schedule."""
        self.microbatches = step.microbatches
        self._updates[step.begins] = step.batch
        if isinstance(step.batch, Batch):
            self._firsts[step.begins] = list(accumulate(step.batch.samples, initial=0))

    def update(self, number: int) -> Apply:
        return self._updates[number]

    def at(self, microbatch: int) -> Position:
        number, place = divmod(microbatch, self.microbatches)
        batch = self._updates[number]
        assert isinstance(batch, Batch)
        return Position(number, batch, place, batch.samples[place])

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
        """Count one stage's update. Forget a mini-batch once `stages` stages have applied it."""
        for number in numbers:
            self._applied[number] += 1
            if self._applied[number] == stages:
                for table in (self._applied, self._updates, self._firsts):
                    table.pop(number, None)

    def clear(self) -> None:
        for table in (self._applied, self._updates, self._firsts):
            table.clear()


@dataclass
class Updates:
    """The updates of a worker's stages; `replicas[n]` is the worker's replica of stage n.

    `scale` returns the factor of a mini-batch's gradients, NaN to drop the gradients. `clip`
    returns the factor that clips the gradients; it gets the sum of the squares of this worker's
    gradients, and the name of a gradient that is not finite. Both functions may wait for the
    controller. `culprit` names a gradient that was applied although it is not finite.
    """

    stages: Mapping[int, Stage]
    replicas: Mapping[int, int]
    shares: Shares
    exchange: Exchange
    mini_batches: MiniBatches
    scale: Callable[[Apply], float]
    clip: Callable[[Apply, float, str], float]
    culprit: str = ""
    _clipped: dict[int, float] = field(default_factory=dict)  # clip's factor, by `serial`

    def apply(self, action: Action) -> Moment:
        """Apply or drop a stage's gradients. Return the moment when this began, after all waits."""
        self.exchange.take_back(action)
        stage, update = self.stages[action.stage], self.mini_batches.update(action.number)
        # Replicas whose gradients are averaged have scaled them before the sum.
        with self.exchange.waits.at(action.stage):
            scale = 1.0 if self.shares.per_update(action.stage) > 1 else self.scale(update)
        factor = 1.0 if math.isnan(scale) else self._clip_factor(stage, update, scale)
        begin = Moment.now()
        if math.isnan(scale):
            stage.undo()
        elif math.isnan(factor) and update.clip is not None and not update.clip.undoes:
            stage.drop_gradients()
        elif math.isnan(factor):
            stage.undo()
        else:
            stage.update(update.rates, scale * factor)
        return begin

    def share_of_sum(self, action: Action) -> float:
        """Return the factor of this replica's gradients in a sum over replicas.

        If replicas take turns, the sum is the scaled mean of their mini-batches' gradients. If they
        divide a mini-batch by rows, the factor is 1, and the update scales the sum.
        """
        if not self.shares.in_turn:
            return 1.0
        replica, together = Replica(action.stage, self.replicas[action.stage]), self.round(action)
        taken = [number for number in together if self.shares.takes(replica, number)]
        scales = (self.scale(self.mini_batches.update(number)) for number in taken)
        with self.exchange.waits.at(action.stage):
            return sum(scales) / len(together)

    def round(self, action: Action) -> range:
        """Return the mini-batches of an update: a round if replicas take turns and average."""
        together = self.shares.per_update(action.stage)
        return round_of(action.number, together, action.number + 1)

    def _clip_factor(self, stage: Stage, update: Apply, scale: float) -> float:
        """Return the factor that clips the scaled gradients; NaN to drop them."""
        clip = update.clip
        if clip is None:
            return 1.0
        if clip.each and not clip.skips:
            square, culprit = _square_of([stage], scale)
            self.culprit = self.culprit or culprit
            return clip.factor(square)
        if update.serial not in self._clipped:  # at the first update all gradients are final
            first = [self.stages[n] for n, replica in self.replicas.items() if replica == 0]
            square, culprit = _square_of(first, scale)  # other replicas have the same gradients
            with self.exchange.waits.at(stage.number):
                self._clipped = {update.serial: self.clip(update, square, culprit)}
        factor = self._clipped[update.serial]
        if clip.each and clip.takes_norms and not math.isnan(factor):
            return clip.factor(stage.square(scale))
        return factor

    def take_culprit(self) -> str:
        """Return `culprit` and reset it."""
        culprit, self.culprit = self.culprit, ""
        return culprit


def _square_of(stages: Sequence[Stage], scale: float) -> tuple[float, str]:
    """Return the sum of the stages' `square`, and a text about a gradient that is not finite."""
    squares = [stage.square(scale) for stage in stages]
    for stage, square in zip(stages, squares, strict=True):
        if not math.isfinite(square):
            name = stage.store.bad_gradient()
            # All gradients may be finite although their sum is too large.
            what = f"the gradient of {name}" if name else "a sum of gradients"
            return sum(squares), f"{what} in stage {stage.number}"
    return sum(squares), ""
