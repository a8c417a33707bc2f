"""How far a device's step is from the judge's, and how far it may be."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hetpipe.bench.judge import Distance, Step, gradient_errors, update_error

if TYPE_CHECKING:
    import numpy as np

    from hetpipe.optim.rule import Optimizer

    Array = np.ndarray[Any, Any]

LOSS_LIMIT = 1e-4
"""The largest relative error of a loss."""
GRADIENT_LIMIT = 1e-3
"""The largest relative error of a gradient, by norms."""
UPDATE_LIMIT = 1e-5
"""The largest relative error of an updated parameter, by norms."""


@dataclass(frozen=True)
class Errors:
    """Relative errors, and of `tensors` gradients the one that is `worst`.

    `crossing` is that of tensors which leave a layer, where each is compared on its own.
    """

    loss: float
    gradient: float
    worst: str
    tensors: int
    update: float
    crossing: float = 0.0

    def within(self, gradient_limit: float, loss_limit: float = LOSS_LIMIT) -> bool:
        """Whether all keep their limits."""
        return (
            self.loss <= loss_limit
            and max(self.gradient, self.crossing) <= gradient_limit
            and self.update <= UPDATE_LIMIT
        )


@dataclass
class Comparison:
    """Takes a device's results one by one, and keeps their errors."""

    rule: Optimizer
    parameters: Mapping[str, torch.Tensor]
    distance: Distance
    seconds: float = 0.0
    """That the comparison itself took."""
    _gradients: dict[str, float] = field(default_factory=dict)
    _update: float = 0.0

    def see(self, name: str, gradient: Array, updated: Array) -> None:
        """Compare a parameter's gradient and its new value."""
        begin_s = time.perf_counter()
        slope, new = torch.from_numpy(gradient), torch.from_numpy(updated)
        self._gradients[name] = self.distance.of(name, slope)
        error = update_error(self.rule, name, self.parameters[name], slope, new)
        self._update = max(self._update, error)
        self.seconds += time.perf_counter() - begin_s

    def errors(self, loss: float, right: Step) -> Errors:
        """All errors; a gradient that torch alone has counts, too."""
        missing = right.gradients.keys() - self._gradients.keys()
        gradients = {name: self.distance.of(name, None) for name in missing} | self._gradients
        return _errors(loss, right, gradients, self._update)


def errors_of(step: Step, right: Step) -> Errors:
    """Those of a step's loss and gradients."""
    return _errors(step.loss, right, gradient_errors(step.gradients, right.gradients), 0.0)


def loss_error(loss: float, right: Step) -> float:
    """The relative error of a loss."""
    return abs(loss - right.loss) / max(abs(right.loss), 1e-30)


def _errors(loss: float, right: Step, gradients: Mapping[str, float], update: float) -> Errors:
    worst = max(gradients, key=gradients.__getitem__, default="")
    return Errors(
        loss=loss_error(loss, right),
        gradient=gradients.get(worst, 0.0),
        worst=worst,
        tensors=len(gradients),
        update=update,
    )
