"""Keeps the versions of a stage's parameters, and chooses one for each pass.

A version is a list of buffers in the order of the stage's parameters. An update makes the next
version. The update may overwrite the present version only if no later pass uses that version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hetpipe.schedule.weights import Keeping
from hetpipe.wire.messages import Keep

Version = list[Any]
"""Buffers; in old versions, None for parameters that another stage owns."""
Predict = Callable[[Version, float], Version]
"""(version, number of updates) -> the version that is expected after these updates."""


class Weights(ABC):
    """The versions of one stage's parameters. `number` counts the updates so far."""

    def __init__(self, parameters: Version, number: int) -> None:
        self.present = parameters
        self.number = number
        self.most_live = 1

    @abstractmethod
    def forward(self, microbatch: int, lag: int, ahead: float) -> Version:
        """Return the version for a forward: `lag` updates old, or predicted for `ahead` updates."""

    @abstractmethod
    def backward(self, microbatch: int) -> Version:
        """Return the version for the backward of a micro-batch."""

    @property
    @abstractmethod
    def disposable(self) -> bool:
        """Whether the update may overwrite the present version."""

    def updated(self, version: Version) -> None:
        """Record the version that an update has made."""
        self.present = version
        self.number += 1

    def live(self, version: Version) -> int:
        """Return the number of versions on the device, including `version`, which a pass reads."""
        return len({id(self.present), id(version)})

    def take_most_live(self) -> int:
        """Return the most versions that existed at once since the last call."""
        most, self.most_live = self.most_live, 1
        return most

    def _live(self, count: int) -> None:
        self.most_live = max(self.most_live, count)


class Flushed(Weights):
    """One version: all passes of a mini-batch use it, then the update replaces it."""

    disposable = True

    def forward(self, microbatch: int, lag: int, ahead: float) -> Version:
        return self.present

    def backward(self, microbatch: int) -> Version:
        return self.present


class Stashed(Weights):
    """The backward uses the version of its forward (PipeDream, section 3.3; 2BW).

    With `keeps`, a forward may use an older version than the present one: all versions since the
    last forward's version are kept.
    """

    def __init__(self, parameters: Version, number: int, keeps: bool) -> None:
        super().__init__(parameters, number)
        self._keeps = keeps
        self._recent = {number: parameters}  # by number, the present one last
        self._used: dict[int, int] = {}  # micro-batch -> number
        self._held: dict[int, Version] = {}  # by number, the versions in `_used`

    def forward(self, microbatch: int, lag: int, ahead: float) -> Version:
        number = self.number - lag
        version = self._recent[number]
        self._used[microbatch], self._held[number] = number, version
        for old in [old for old in self._recent if old < number]:
            del self._recent[old]
        self._live(len({*self._recent, *self._held}))
        return version

    def backward(self, microbatch: int) -> Version:
        number = self._used.pop(microbatch)
        version = self._held[number]
        if number not in self._used.values():
            del self._held[number]
        return version

    def live(self, version: Version) -> int:
        return len({id(v) for v in (*self._recent.values(), *self._held.values(), version)})

    @property
    def disposable(self) -> bool:
        return not self._keeps and self.number not in self._held

    def updated(self, version: Version) -> None:
        super().updated(version)
        if not self._keeps:
            self._recent.clear()
        self._recent[self.number] = version


class Predicted(Weights):
    """A forward uses the weights that are predicted for its backward (PipeOptim; SpecTrain).

    A backward uses weights that are predicted for `backward_ahead` updates later (SpecTrain).
    """

    disposable = True

    def __init__(
        self, parameters: Version, number: int, predict: Predict, backward_ahead: int
    ) -> None:
        super().__init__(parameters, number)
        self._predict = predict
        self._backward_ahead = backward_ahead

    def forward(self, microbatch: int, lag: int, ahead: float) -> Version:
        return self._predict_version(ahead)

    def backward(self, microbatch: int) -> Version:
        return self._predict_version(self._backward_ahead)

    def _predict_version(self, ahead: float) -> Version:
        if ahead == 0 or self.number == 0:  # nothing is known before the first update
            return self.present
        self._live(2)
        return self._predict(self.present, ahead)


def make_weights(keep: Keep, stage: int, parameters: Version, predict: Predict | None) -> Weights:
    """Return the versions of a stage under a policy. `predict` is None if the stage owns no
    parameter, so there is nothing to predict."""
    policy = keep.policy
    updates = keep.updates[stage] if keep.updates else 0
    if policy.keeping is Keeping.PRESENT or (policy.predicts and predict is None):
        return Flushed(parameters, updates)
    if predict is None or not policy.predicts:
        return Stashed(parameters, updates, keeps=policy.keeping is Keeping.RECENT)
    ahead = 0 if policy.backward_ahead is None else policy.backward_ahead(stage)
    return Predicted(parameters, updates, predict, ahead)
