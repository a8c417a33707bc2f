"""The results of mini-batches: loss, update, learning rates and seconds."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpipe.optim.rule import Optimizer


@dataclass(frozen=True)
class Result:
    """One mini-batch of a run.

    `versions`: by stage, how many mini-batches had been applied to the weights that the stage's
    last forward used. `live_versions`: by stage, the most versions that existed together. `update`
    is the number of the update that applies the mini-batch, from 1, and `rates` are its learning
    rates, one for each group of parameters. `gradient_norm` is the norm of all gradients before
    they are clipped; None without a clip, without flushes, or if the mini-batch is accumulated.
    `took_s` counts from the previous result, or from the begin of the mini-batch if that is later.
    """

    index: int
    loss: float
    versions: tuple[int, ...]
    live_versions: tuple[int, ...] = ()
    samples: int = 0
    update: int = 0
    rates: tuple[float, ...] = ()
    gradient_norm: float | None = None
    took_s: float = 0.0


HISTORY = 1000
"""The number of latest results that are kept."""


@dataclass(frozen=True)
class HandedOut:
    """A mini-batch under way: its number, micro-batches, update and begin."""

    number: int
    samples: tuple[int, ...]
    update: int
    begin_s: float = field(default_factory=time.monotonic)


class Results:
    """Makes the results of mini-batches in their order."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.history: deque[Result] = deque(maxlen=HISTORY)
        self._last_s = 0.0  # when the last result was made

    def recent_s(self, count: int) -> list[float]:
        """Return the seconds of at most `count` latest results."""
        return [result.took_s for result in islice(reversed(self.history), count)]

    def make(
        self, handed: HandedOut, loss: float, versions: tuple[int, ...], **more: Any
    ) -> Result:
        """Return the result of a mini-batch; `more` has further fields."""
        now_s = time.monotonic()
        took_s, self._last_s = now_s - max(handed.begin_s, self._last_s), now_s
        rates = tuple(rule.lr_at(handed.update) for rule in self._optimizer.rules)
        more |= {"samples": sum(handed.samples), "update": handed.update}
        result = Result(handed.number, loss, versions, **more, rates=rates, took_s=took_s)
        self.history.append(result)
        return result
