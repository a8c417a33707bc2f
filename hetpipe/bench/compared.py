"""Errors of a device's step relative to the judge's step, and their limits.

The judge is eager torch in float64, see `hetpipe.bench.judge`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """Relative errors of a step: the loss, the gradients (their number is `tensors`), the updates.

    `worst` names the gradient with the largest error. `crossing` is the largest error of tensors
    that leave a layer, if layers are compared separately. `undetermined` names the gradients for
    which torch's float32 operators also exceed the limit. `passed` counts the tensors that leave
    layers and for which the same holds. Neither is part of the errors.
    """

    loss: float
    gradient: float
    worst: str
    tensors: int
    update: float
    crossing: float = 0.0
    undetermined: tuple[str, ...] = ()
    passed: int = 0

    def within(self, gradient_limit: float, loss_limit: float = LOSS_LIMIT) -> bool:
        """Return whether all errors are within their limits."""
        return (
            self.loss <= loss_limit
            and max(self.gradient, self.crossing) <= gradient_limit
            and self.update <= UPDATE_LIMIT
        )


@dataclass
class Comparison:
    """Comparison of a device's gradients and updates with the judge's, one parameter at a time."""

    rule: Optimizer
    parameters: Mapping[str, torch.Tensor]
    distance: Distance
    seconds: float = 0.0
    """Seconds spent comparing."""
    gradients: dict[str, float] = field(default_factory=dict)
    """Errors of the gradients so far, by parameter."""
    _update: float = 0.0

    def see(self, name: str, gradient: Array, updated: Array | None) -> None:
        """Compare a parameter's gradient, and its new value unless `updated` is None."""
        begin_s = time.perf_counter()
        slope = torch.from_numpy(gradient)
        self.gradients[name] = self.distance.of(name, slope)
        if updated is not None:
            new = torch.from_numpy(updated)
            error = update_error(self.rule, name, self.parameters[name], slope, new)
            self._update = max(self._update, error)
        self.seconds += time.perf_counter() - begin_s

    def errors(self, loss: float, right: Step, undetermined: tuple[str, ...] = ()) -> Errors:
        """Return the errors of the step; leave out the gradients that `undetermined` names.

        If only the judge has a gradient that is not zero, that is an infinite error.
        """
        missing = right.gradients.keys() - self.gradients.keys()
        gradients = {name: self.distance.of(name, None) for name in missing} | self.gradients
        counted = {name: error for name, error in gradients.items() if name not in undetermined}
        return replace(_errors(loss, right, counted, self._update), undetermined=undetermined)


def errors_of(step: Step, right: Step) -> Errors:
    """Return the errors of a step's loss and gradients; its updates count as right."""
    return _errors(step.loss, right, gradient_errors(step.gradients, right.gradients), 0.0)


def _errors(loss: float, right: Step, gradients: Mapping[str, float], update: float) -> Errors:
    worst = max(gradients, key=gradients.__getitem__, default="")
    return Errors(
        loss=abs(loss - right.loss) / max(abs(right.loss), 1e-30),
        gradient=gradients.get(worst, 0.0),
        worst=worst,
        tensors=len(gradients),
        update=update,
    )
