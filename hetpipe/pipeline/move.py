"""A move of layers from one plan to another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from hetpipe.pipeline.earlier import GAIN
from hetpipe.plan.plan import Plan

HORIZON = 1000
"""A move must save more seconds in this many steps than the move takes."""


@dataclass(frozen=True)
class Move:
    """The best plan and the present plan, both priced by the same costs."""

    present: Plan
    best: Plan
    move_s: float

    @property
    def promised(self) -> float:
        """The share of a step that the best plan saves."""
        before_s = self.present.step_s
        return 1 - self.best.step_s / before_s if before_s > 0 else 0.0

    @property
    def saving(self) -> str:
        """The saved time as a text."""
        before_s, after_s = self.present.step_s, self.best.step_s
        return (
            f"the best plan promises {after_s * 1e3:.1f} ms a step instead of "
            f"{before_s * 1e3:.1f} ms (-{100 * self.promised:.0f} %)"
        )

    def pays(self, steps: int) -> bool:
        """Whether the best plan saves more than `GAIN` of a step, and more seconds in `steps` steps
        than the move takes."""
        saved_s = steps * (self.present.step_s - self.best.step_s)
        return self.promised > GAIN and saved_s > self.move_s


def layer_moves(before: Plan, after: Plan) -> str:
    """Describe which layers move, and where to."""
    ways = zip(before.layers, _places(before), _places(after), strict=True)
    numbered = [(n, *way) for n, way in enumerate(ways) if way[1] != way[2]]
    groups = [list(group) for _, group in groupby(numbered, lambda each: each[2:])]
    texts = []
    for group in groups:
        (first, name, source, target), (last, *_) = group[0], group[-1]
        span = f"layer {first} ({name})" if first == last else f"layers {first} to {last}"
        texts.append(f"{span} moved from {source} to {target}")
    return " and ".join(texts) or f"micro-batches in flight are {list(after.in_flight)} now"


def _places(plan: Plan) -> Iterator[str]:
    """Yield the member of every layer."""
    for stage in plan.stages:
        yield from stage.devices[:1] * (stage.hi - stage.lo)
