"""Loss scaling: keeps small gradients above the smallest float16.

The gradient of the loss is multiplied by a scale, and the update divides gradients by the same
scale. Micikevicius et al., "Mixed precision training" (ICLR 2018), section 3.2; the scale adapts as
in `torch.amp.GradScaler`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from hetpipe.errors import HetpipeError
from hetpipe.records import Count, Number
from hetpipe.wire.messages import Clip


@dataclass(frozen=True)
class LossScale:
    """A scale that begins at `start` and adapts.

    If a gradient is not finite, the update is skipped, and the scale is multiplied by `backoff`.
    After `interval` good updates in a row the scale is multiplied by `growth`.
    """

    start: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        sound = self.growth > 1 > self.backoff > 0 and self.interval > 0
        if not (1 <= self.start < math.inf and sound):
            raise HetpipeError(
                f"{self}: start must be at least 1 and finite, growth above 1, backoff between 0 "
                "and 1, interval above 0"
            )


@dataclass(frozen=True)
class ScaleState:
    """A scale in a checkpoint: `good` updates since the scale changed, `skipped` updates in all."""

    scale: Annotated[float, Number(above=True)]
    good: Count
    skipped: Count


class Scaling:
    """The present scale. A `rule` adapts it; without a rule it is fixed."""

    def __init__(self, rule: LossScale | None, scale: float) -> None:
        self.rule = rule
        self.scale = scale
        self.skipped = 0
        self._good = 0  # good updates since the scale changed

    def record(self, skipped: bool) -> None:
        """Adapt the scale after an update. Raises `HetpipeError` for a skipped update at a scale of
        1 or less, because a lower scale does not help then."""
        if self.rule is None:
            return
        if skipped:
            self.skipped += 1
            self._good = 0
            if self.scale <= 1:
                raise HetpipeError(
                    f"gradients are not finite at a loss scale of {self.scale:g}, so the scale is "
                    "not the reason: pipe.diagnose(x, y) names the first operator whose result is "
                    "not finite; or train in bfloat16"
                )
            self.scale *= self.rule.backoff
            return
        self._good += 1
        if self._good == self.rule.interval:
            self.scale, self._good = self.scale * self.rule.growth, 0

    def state(self) -> ScaleState:
        """Return the state for a checkpoint."""
        return ScaleState(self.scale, self._good, self.skipped)

    def restore(self, state: ScaleState, same: bool = True) -> None:
        """Continue from a checkpoint's state. A fixed scale stays unchanged, and so does the start
        of a rule that is not the `same` as before."""
        self.skipped = state.skipped
        if self.rule is not None and same:
            self.scale, self._good = state.scale, state.good


def choose_scaling(
    rule: float | LossScale | None, compute: str | None, asynchronous: bool
) -> Scaling:
    """Return the scaling for the option `rule`; None means `LossScale()` for float16, else 1.

    `compute` is the dtype in which passes compute. Raises `HetpipeError` for a rule that adapts
    under an asynchronous schedule.
    """
    if rule is None:
        rule = LossScale() if compute == "float16" else 1.0
    if not isinstance(rule, LossScale):
        return Scaling(None, float(rule))
    if asynchronous:
        raise HetpipeError(
            "an asynchronous schedule has no moment at which all stages could skip an update, so "
            "the loss scale cannot adapt: give a fixed scale, such as loss_scale=1024.0, or use a "
            "synchronous schedule"
        )
    return Scaling(rule, rule.start)


def watch_gradients(clip: Clip | None, scaling: Scaling, asynchronous: bool) -> Clip:
    """Return `clip`, extended to look for gradients that are not finite.

    An update with such gradients is skipped; an asynchronous schedule applies and reports it.
    Raises `HetpipeError` if `clip` does not fit a loss scale that adapts.
    """
    norm = math.inf if clip is None else clip.norm
    if asynchronous:
        return Clip(norm, each=True)
    if scaling.rule is None:
        return Clip(norm, clip is not None and clip.each, skips=True, undoes=True)
    if clip is not None and clip.each:
        raise HetpipeError(
            "clip_each=True looks at each stage's gradients alone, but a loss scale that adapts "
            "looks at the gradients of all stages: clip by the norm over all stages, or give a "
            "fixed loss_scale"
        )
    return Clip(norm, skips=True)
