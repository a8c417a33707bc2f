"""Position: the place in a fit at which a checkpoint was saved, as the checkpoint's notes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hetpipe.callbacks.base import Result
from hetpipe.callbacks.history import Epoch
from hetpipe.errors import CheckpointError
from hetpipe.records import Count, Source

KEY = "fit"
"""The name of the notes of a fit."""


@dataclass
class Sums:
    """The sums over the results of an epoch."""

    loss: float = 0.0
    samples: Count = 0
    first: Count = 0
    """The number of the first update, or 0 before it."""
    last: Count = 0
    took_s: float = 0.0

    def add(self, result: Result) -> None:
        """Add a mini-batch."""
        self.loss += result.loss * result.samples
        self.samples += result.samples
        self.first, self.last = self.first or result.update, result.update

    def epoch(self, number: int, **evaluated: Any) -> Epoch:
        """Return the epoch with these sums."""
        updates, mean = self.last - self.first + 1, self.loss / self.samples
        return Epoch(number, mean, self.samples, updates, self.last, self.took_s, **evaluated)


@dataclass
class Position:
    """The present epoch, from 1, and the number of mini-batches that were trained in it."""

    epoch: Count = 1
    batches: Count = 0
    ended: bool = False
    """Whether these are all mini-batches of the epoch."""
    update: Count = 0
    """The number of the last update."""
    sums: Sums = field(default_factory=Sums)
    chance: str = ""
    """The states of generators at the begin of the epoch, see `hetpipe.loop.chance`."""
    loader: str = ""
    """The present state of a loader that has one."""
    history: tuple[Epoch, ...] = ()

    def place(self, epochs: int, where: object) -> str:
        """Return a line that says where a fit of `epochs` epochs continues."""
        if self.epoch > epochs:
            return f"fit has nothing to train: {where} has {self.epoch - 1} of {epochs} epochs"
        after = f" after {self.batches} mini-batches" if self.batches else ""
        return (
            f"fit continues from {where}: epoch {self.epoch} of {epochs}{after}, update "
            f"{self.update + 1}"
        )

    def notes(self) -> dict[str, Any]:
        """Return the notes for a checkpoint."""
        return {KEY: _plain(asdict(self))}


def position_of(notes: Mapping[str, Any], where: object) -> Position:
    """Return the position in the notes of a checkpoint. Raises `CheckpointError`."""
    if KEY not in notes:
        raise CheckpointError(
            f"{where} was not saved by fit(): continue from it with Pipeline.load, and give fit() "
            "another folder"
        )
    source = Source("the state of the fit", CheckpointError, str(where))
    return source.record(Position, notes[KEY])


def _plain(value: Any) -> Any:
    """Return values as JSON has them; numbers that are not finite become text."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
