"""Timeline: when each worker did each action, predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.schedule.action import Action


@dataclass(frozen=True)
class Span:
    """One action on one worker; seconds since the step began."""

    worker: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Spans of one mini-batch. `label`: measured, emulated, modelled or predicted."""

    workers: tuple[str, ...]  # device id per worker
    spans: tuple[Span, ...]
    label: str

    @property
    def step_s(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)
