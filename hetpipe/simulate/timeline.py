"""Timeline: when each worker ran each action, predicted or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, NamedTuple

import numpy as np

from hetpipe.errors import ScheduleError
from hetpipe.html import Bar, bars_html, table_html
from hetpipe.records import Count, Number, Parsed, Source
from hetpipe.schedule.action import Action
from hetpipe.schedule.codes import COMPUTES, Array
from hetpipe.schedule.columns import Columns, LazySequence
from hetpipe.words import format_s

VERSION = 1
COLOURS = {"F": "#7fb3d5", "B": "#f5b971", "I": "#e58b6b", "W": "#f7df8e", "U": "#8fbc8f"}
"""Colours of passes in notebooks, by the operation's letter."""


class Span(NamedTuple):
    """One action on one worker. Times are in seconds since the step or stream began."""

    worker: int
    action: Action
    start_s: float
    end_s: float


class SpanColumns(LazySequence[Span]):
    """The spans of a schedule's actions, as columns. `starts_s` and `ends_s` have the actions row
    by row, as in the schedule."""

    def __init__(self, schedule: Columns, starts_s: Array, ends_s: Array) -> None:
        self.schedule, self.starts_s, self.ends_s = schedule, starts_s, ends_s

    @cached_property
    def items(self) -> tuple[Span, ...]:
        """The spans, sorted by start, end and row."""
        rows, actions = self.schedule.rows, [*chain.from_iterable(self.schedule)]
        order = np.lexsort((rows, self.ends_s, self.starts_s))
        columns = (
            rows[order].tolist(),
            map(actions.__getitem__, order.tolist()),
            self.starts_s[order].tolist(),
            self.ends_s[order].tolist(),
        )
        return tuple(map(Span._make, zip(*columns, strict=True)))

    def step_s(self) -> float:
        """Return the seconds from the first start to the last end."""
        return float(self.ends_s.max(initial=0.0) - self.starts_s.min(initial=0.0))

    def __len__(self) -> int:
        return len(self.starts_s)

    def busy_s(self) -> tuple[float, ...]:
        """Return the seconds of compute, by row."""
        computes = COMPUTES[self.schedule.codes]
        rows, lasts_s = self.schedule.rows[computes], (self.ends_s - self.starts_s)[computes]
        return tuple(np.bincount(rows, lasts_s, len(self.schedule)).tolist())


@dataclass(frozen=True)
class Timeline:
    """The spans of a step, and their `label`: measured, emulated, modelled or predicted."""

    workers: tuple[str, ...]  # member id per worker, or per lane if a worker has several
    spans: Sequence[Span]  # a tuple, or `SpanColumns`
    label: str
    overhead_s: float = 0.0  # the controller's seconds before and after all spans
    clock_error_s: float = 0.0  # of spans on other hosts, which have other clocks

    @property
    def title(self) -> str:
        """The label and, with several hosts, the error of their clocks."""
        if not self.clock_error_s:
            return self.label
        return f"{self.label}, clocks of hosts within {1e3 * self.clock_error_s:.2f} ms"

    @property
    def step_s(self) -> float:
        """Seconds from the first start to the last end."""
        if isinstance(self.spans, SpanColumns):
            return self.spans.step_s()
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)

    @property
    def total_s(self) -> float:
        """Seconds for which the caller of a step waits: `step_s` plus `overhead_s`."""
        return self.step_s + self.overhead_s

    def busy_s(self) -> tuple[float, ...]:
        """Return the seconds of compute, by entry of `workers`."""
        if isinstance(self.spans, SpanColumns):
            return self.spans.busy_s()
        busy_s = [0.0] * len(self.workers)
        for span in self.spans:
            if span.action.op.is_compute:
                busy_s[span.worker] += span.end_s - span.start_s
        return tuple(busy_s)

    def busy_share(self) -> tuple[float, ...]:
        """Return the seconds of compute over `step_s`, by entry of `workers`."""
        step_s = self.step_s
        return tuple(busy_s / step_s if step_s else 0.0 for busy_s in self.busy_s())

    def under_way_s(self) -> tuple[float, float]:
        """Return the sum of the seconds for which each message is under way, and the hidden part of
        this sum.

        A message is under way from the start of its send to its arrival. This time is hidden while
        the receiving worker computes. A message arrives when its receive ends. But if a predicted
        receive has no length, the worker did not have to wait: the message arrived at the end of
        its send.
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

    def _repr_html_(self) -> str:
        begin_s = min((span.start_s for span in self.spans), default=0.0)
        whole_s = self.step_s or 1.0
        rows: list[list[Bar]] = [[] for _ in self.workers]
        for span in self.spans:
            if span.action.op.is_compute:
                at = (span.start_s - begin_s) / whole_s, (span.end_s - begin_s) / whole_s
                rows[span.worker].append(Bar(*at, str(span.action), COLOURS[span.action.op[0]]))
        busy = [f"{share:.0%}" for share in self.busy_share()]
        columns = ("worker", "computes")
        title = f"Timeline of {format_s(self.step_s)}, {self.title}"
        shares = table_html(title, columns, zip(self.workers, busy, strict=True), columns[1:])
        return shares + bars_html(title, self.workers, rows)

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write; actions are text."""
        error = {"clock_error_s": self.clock_error_s} if self.clock_error_s else {}
        return {
            "version": VERSION,
            "workers": list(self.workers),
            "label": self.label,
            "overhead_s": self.overhead_s,
            **error,
            "spans": [[s.worker, str(s.action), s.start_s, s.end_s] for s in self.spans],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "") -> Timeline:
        """Return the timeline of a dict from `to_json`; `where` is its file.

        Raises `ScheduleError` for an unknown version, and for a wrong entry, with its place.
        """
        source = Source("the timeline", ScheduleError, where)
        if isinstance(data, Mapping):  # files of one host lack the error
            data = {"clock_error_s": 0.0, **data}
        record = source.versioned(_Timeline, data, VERSION)
        for index, (worker, _, start_s, end_s) in enumerate(record.spans):
            if worker >= len(record.workers):
                why = f"is {worker}, but there are {len(record.workers)} workers"
                raise source.fault(("spans", index, 0), why)
            if end_s < start_s:
                raise source.fault(("spans", index, 3), f"is {end_s}, before the start {start_s}")
        spans = tuple(Span(*span) for span in record.spans)
        times_s = record.overhead_s, record.clock_error_s
        return Timeline(record.workers, spans, record.label, *times_s)


Moment = Annotated[float, Number(-1e9, 1e9)]


@dataclass(frozen=True)
class _Timeline:
    """A timeline in JSON."""

    workers: tuple[str, ...]
    label: str
    overhead_s: Moment
    spans: tuple[tuple[Count, Annotated[Action, Parsed(Action.parse)], Moment, Moment], ...]
    clock_error_s: Annotated[float, Number(0.0, 1e9)]
