"""Timeline: when each worker did each action, predicted or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetpipe.errors import HetpipeError
from hetpipe.schedule.action import Action

VERSION = 1


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

    workers: tuple[str, ...]  # member id per worker; where one has several lanes, per lane
    spans: tuple[Span, ...]
    label: str
    overhead_s: float = 0.0  # before and after all spans: handing the batch out, gathering

    @property
    def step_s(self) -> float:
        """Seconds from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)

    @property
    def total_s(self) -> float:
        """Seconds of the step for its caller: `step_s` and the overhead."""
        return self.step_s + self.overhead_s

    def busy_s(self) -> tuple[float, ...]:
        """Per worker, seconds of compute."""
        busy_s = [0.0] * len(self.workers)
        for span in self.spans:
            if span.action.op.is_compute:
                busy_s[span.worker] += span.end_s - span.start_s
        return tuple(busy_s)

    def busy_share(self) -> tuple[float, ...]:
        """Per worker, compute over `step_s`; the rest is its bubble."""
        step_s = self.step_s
        return tuple(busy_s / step_s if step_s else 0.0 for busy_s in self.busy_s())

    def under_way_s(self) -> tuple[float, float]:
        """Two sums in seconds: messages' times from leaving to arrival, and their hidden parts.

        A part is hidden if the receiving worker computes meanwhile. A message arrives when its
        receive ends, or, if a predicted receive has no length, when its send ended: the message
        was there before the worker asked for it.
        """
        sends = {s.action.message: s for s in self.spans if s.action.op.is_send}
        total_s = hidden_s = 0.0
        for span in self.spans:
            send = sends.get(span.action.message) if span.action.op.is_receive else None
            if send is None:
                continue
            arrival_s = span.end_s if span.end_s > span.start_s else send.end_s
            total_s += arrival_s - send.start_s
            hidden_s += sum(
                max(0.0, min(s.end_s, arrival_s) - max(s.start_s, send.start_s))
                for s in self.spans
                if s.worker == span.worker and s.action.op.is_compute
            )
        return total_s, hidden_s

    def to_json(self) -> dict[str, Any]:
        """A dict that `json` can write; actions as text."""
        return {
            "version": VERSION,
            "workers": list(self.workers),
            "label": self.label,
            "overhead_s": self.overhead_s,
            "spans": [[s.worker, str(s.action), s.start_s, s.end_s] for s in self.spans],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Timeline:
        """The inverse of `to_json`. Raises `HetpipeError` for another version or a missing key."""
        if data.get("version") != VERSION:
            found = data.get("version")
            raise HetpipeError(f"timeline has version {found}, this hetpipe reads {VERSION}")
        try:
            spans = [Span(w, Action.parse(action), lo, hi) for w, action, lo, hi in data["spans"]]
            workers, label = tuple(data["workers"]), data["label"]
            return Timeline(workers, tuple(spans), label, data["overhead_s"])
        except KeyError as error:
            raise HetpipeError(f"timeline lacks the key {error}") from error
