"""History: the losses and metrics of every epoch of a fit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

LOSSES = ("loss", "eval_loss")
"""Values of an epoch that are better if they are lower."""
COUNTS = ("epoch", "samples", "updates", "update", "took_s")
"""The other values of an epoch, apart from its metrics."""


@dataclass(frozen=True)
class Epoch:
    """One epoch of a fit.

    `epoch` counts from 1. `loss` is the mean training loss over the `samples`, and `took_s` the
    seconds of the training. `updates` is the number of updates, and `update` the number of the last
    one since the training began. Without evaluation `eval_loss` is None and `metrics` is empty.
    """

    epoch: int
    loss: float
    samples: int
    updates: int
    update: int
    took_s: float
    eval_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """The losses and metrics, by name: `loss`, `eval_loss` and each metric."""
        evaluated = {} if self.eval_loss is None else {"eval_loss": self.eval_loss}
        return {"loss": self.loss, **evaluated, **self.metrics}


class History:
    """The epochs of a fit, with the epochs before it was resumed."""

    def __init__(self, epochs: Iterable[Epoch] = ()) -> None:
        self.epochs: list[Epoch] = list(epochs)

    def rows(self) -> list[dict[str, float]]:
        """Return one dict per epoch: its counts, losses and metrics, for tables."""
        return [
            {name: getattr(each, name) for name in COUNTS} | each.values for each in self.epochs
        ]

    def best(self, name: str, mode: str | None = None) -> Epoch | None:
        """Return the first epoch with the best value of a loss or metric; None without epochs.

        By default a loss is better if it is lower, and a metric if it is higher; `mode` is "min" or
        "max" for another rule.
        """
        sign = 1 if (mode or ("min" if name in LOSSES else "max")) == "min" else -1
        known = [each for each in self.epochs if not math.isnan(each.values.get(name, math.nan))]
        return min(known, key=lambda each: sign * each.values[name], default=None)
