"""Writes timelines as Chrome's trace-event JSON, which Perfetto (ui.perfetto.dev) also opens.

In the trace, a timeline is a process. One thread for each lane has the passes and waits. Sums and
messages overlap passes and each other, so they are on additional threads. Predicted bytes of memory
are counters. The format is described
in "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from hetpipe.errors import CostError
from hetpipe.files import write_beside
from hetpipe.report.intervals import Interval, Kind, intervals, pair_messages
from hetpipe.schedule.action import Action, Op
from hetpipe.simulate.outcome import MemoryUse
from hetpipe.simulate.timeline import Span, Timeline

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
CATEGORIES = dict.fromkeys(BACKWARDS, "backward") | {
    Kind.FORWARD: "forward",
    Kind.UPDATE: "update",
    Kind.LOSS: "loss",
    Kind.TRANSFER: "transfer",
    Kind.SUM: "sum",
    Kind.WAIT: "wait",
}

GAP_S = 1e-8
"""Least gap between events of a thread, so that the end of an arrow belongs to only one event."""

Event = dict[str, Any]


@dataclass(frozen=True)
class Details:
    """Facts about stages for the events of a trace: layers by stage, and bytes by cut.

    `memory` has the bytes over time by worker, for the timeline with the label `predicted`.
    """

    layers: Sequence[str] = ()
    cut_nbytes: Sequence[int] = ()
    memory: Mapping[str, MemoryUse] = field(default_factory=dict)

    def of(self, action: Action) -> dict[str, str | int]:
        """Return the arguments of an action's event."""
        stage, found = action.stage, dict[str, str | int](stage=action.stage)
        if stage < len(self.layers):
            found["layers"] = self.layers[stage]
        if action.op.value in MICRO_BATCHES:
            found["micro-batch"] = action.number
        cut = stage + CUTS[action.op.value] if action.op.value in CUTS else -1
        if 0 <= cut < len(self.cut_nbytes):
            found["bytes"] = self.cut_nbytes[cut]
        return found


MICRO_BATCHES = {"F", "B", "I", "W", "SF", "RF", "SB", "RB"}
CUTS = {"SF": 0, "RF": -1, "SB": -1, "RB": 0}
"""For messages over cuts, the number of the cut relative to the stage."""


def write_trace(path: Path, timelines: Sequence[Timeline], details: Details | None = None) -> None:
    """Write timelines as one trace; all timelines begin at time 0 of the trace.

    Events have their stage and micro-batch as arguments, and further facts from `details`.

    Every span is an event with the span's times, except that a receive does not begin before its
    send: until then the lane waits. Raises `HetpipeError` if the file cannot be written, and
    `CostError` if a time is not finite in microseconds.
    """
    events = [
        event
        for process, timeline in enumerate(timelines, 1)
        for event in _Process(process, timeline, details or Details()).events()
    ]
    try:
        text = json.dumps({"traceEvents": events}, allow_nan=False)
    except ValueError as error:
        last_s = max(span.end_s for timeline in timelines for span in timeline.spans)
        raise CostError(
            f"cannot write {path}: a timeline ends at {last_s:g} s, which is not a finite number "
            "of microseconds, the unit of a trace; check the costs"
        ) from error
    write_beside(path, text)


class _Process:
    """One timeline. Sums and messages get the first free thread, so that events never overlap."""

    def __init__(self, number: int, timeline: Timeline, details: Details) -> None:
        self._number, self._details = number, details
        self._timeline = timeline
        self._begin_s = min((span.start_s for span in timeline.spans), default=0.0)
        self._free_s: list[list[float]] = [[] for _ in timeline.workers]  # additional threads
        self._threads: dict[tuple[int, int], int] = {}

    def events(self) -> list[Event]:
        """Return the timeline's events, after the names of the process and its threads."""
        shown = intervals(self._timeline)
        passes = [
            self._pass(interval)
            for interval in shown
            if interval.kind not in (Kind.SUM, Kind.TRANSFER)
        ]
        beside = [*self._beside()]
        named = [self._name(0, "process_name", self._timeline.title)]
        for (worker, track), thread in sorted(self._threads.items()):
            member = self._timeline.workers[worker]
            named.append(self._name(thread, "thread_name", member if not track else f"{member} +"))
            named.append(self._meta(thread, "thread_sort_index", sort_index=thread))
        return [*named, *passes, *beside, *self._counters()]

    def _counters(self) -> Iterator[Event]:
        if self._timeline.label != "predicted":
            return
        for worker, use in self._details.memory.items():
            name = f"memory of {worker}"
            for at_s, nbytes in zip(use.seconds.tolist(), use.nbytes.tolist(), strict=True):
                where = {"pid": self._number, "tid": 0, "ts": self._us(at_s)}
                yield {"ph": "C", "name": name, **where, "args": {"bytes": int(nbytes)}}

    def _pass(self, each: Interval) -> Event:
        name = f"wait for {each.action}" if each.kind is Kind.WAIT else str(each.action)
        thread = self._thread(each.worker, 0)
        return self._complete(name, each.action, each.kind, thread, (each.start_s, each.end_s))

    def _beside(self) -> Iterator[Event]:
        """Yield the events of sums and messages, and an arrow from each send to its receive."""
        spans = [s for s in self._timeline.spans if not s.action.op.holds]
        send_of = {id(receive): send for send, receive in pair_messages(spans)}
        threads: dict[int, int] = {}
        for span in sorted(spans, key=attrgetter("start_s")):
            start_s = _leaves_s(span, send_of.get(id(span)))
            thread = threads[id(span)] = self._thread_beside(span.worker, start_s, span.end_s)
            kind = Kind.SUM if span.action.op is Op.ALL_REDUCE else Kind.TRANSFER
            ends_s = start_s, span.end_s
            yield self._complete(str(span.action), span.action, kind, thread, ends_s)
        for number, span in enumerate(spans):
            if (send := send_of.get(id(span))) is not None:
                yield self._arrow("s", number, threads[id(send)], send.start_s)
                yield self._arrow("f", number, threads[id(span)], _leaves_s(span, send), bp="e")

    def _complete(
        self, name: str, action: Action, kind: Kind, thread: int, ends_s: tuple[float, float]
    ) -> Event:
        where = {"pid": self._number, "tid": thread, "ts": self._us(ends_s[0])}
        return {
            "ph": "X", "name": name, "cat": CATEGORIES[kind], **where,
            "dur": round((ends_s[1] - ends_s[0]) * 1e6, 3), "args": self._details.of(action),
        }  # fmt: skip

    def _arrow(self, phase: str, number: int, thread: int, time_s: float, **more: str) -> Event:
        where = {"pid": self._number, "tid": thread, "ts": self._us(time_s)}
        unique = f"{self._number:x}{number:08x}"  # Perfetto reads it as a hexadecimal number
        return {"ph": phase, "id": unique, "name": "message", "cat": "transfer", **where, **more}

    def _name(self, thread: int, what: str, name: str) -> Event:
        return self._meta(thread, what, name=name)

    def _meta(self, thread: int, what: str, **args: Any) -> Event:
        return {"ph": "M", "name": what, "pid": self._number, "tid": thread, "args": args}

    def _us(self, time_s: float) -> float:
        return round((time_s - self._begin_s) * 1e6, 3)

    def _thread(self, worker: int, track: int) -> int:
        return self._threads.setdefault((worker, track), 100 * worker + track + 1)

    def _thread_beside(self, worker: int, lo: float, hi: float) -> int:
        tracks = self._free_s[worker]
        track = next((n for n, free_s in enumerate(tracks) if free_s + GAP_S <= lo), len(tracks))
        tracks[track:] = [hi, *tracks[track + 1 :]]
        return self._thread(worker, track + 1)


def _leaves_s(span: Span, send: Span | None) -> float:
    """Return the start of a span; a receive starts at its send's start if this is later."""
    return span.start_s if send is None else min(max(span.start_s, send.start_s), span.end_s)
