"""Turns a timeline into intervals for people: passes, sums, transfers and waits.

A predicted receive begins when its worker asks for the message, but a measured receive begins when
the message arrives. The same rules derive transfers and waits from predicted and measured spans:

- A message is under way while its send lasts. If the receiving lane ends passes between the end of
  the send and the beginning of the receive, the message waits until the last of them ends. Then it
  is under way again until its receive ends.
- A sum over replicas begins when the last replica begins it.
- A lane waits before its first pass and between two passes, except while a message for the later
  pass is under way or, before an update, while the lane sums.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from hetpipe.schedule.action import Action, Message, Op
from hetpipe.simulate.outcome import RECEIVES
from hetpipe.simulate.timeline import Span, Timeline


class Kind(str, Enum):
    """The activity of a lane in an interval; the value is a text for people."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward: inputs"
    BACKWARD_WEIGHT = "backward: weights"
    UPDATE = "update"
    LOSS = "loss of the mini-batch"
    SUM = "sum over replicas"
    TRANSFER = "transfer"
    WAIT = "wait"


PASSES = {
    Op.FORWARD: Kind.FORWARD,
    Op.BACKWARD: Kind.BACKWARD,
    Op.BACKWARD_INPUT: Kind.BACKWARD_INPUT,
    Op.BACKWARD_WEIGHT: Kind.BACKWARD_WEIGHT,
    Op.UPDATE: Kind.UPDATE,
    Op.LOSS: Kind.LOSS,
}
"""Actions that occupy a lane. In this module an update and a loss count as passes."""


class Interval(NamedTuple):
    """A part of a row of a timeline, in the timeline's seconds."""

    kind: Kind
    worker: int
    action: Action  # for a transfer, the receive; for a wait, the delayed pass
    start_s: float
    end_s: float


def intervals(timeline: Timeline) -> list[Interval]:
    """Return all intervals: passes, sums, transfers, waits. A transfer is on its receiver's row."""
    passes = [
        Interval(PASSES[span.action.op], span.worker, span.action, span.start_s, span.end_s)
        for span in timeline.spans
        if span.action.op in PASSES
    ]
    lanes = _by_worker(passes)
    sums = [*_sums(timeline.spans)]
    transfers = [*_transfers(timeline.spans, lanes)]
    begin_s = min((span.start_s for span in timeline.spans), default=0.0)
    return [*passes, *sums, *transfers, *_waits(lanes, [*sums, *transfers], begin_s)]


def pair_messages(spans: Sequence[Span]) -> list[tuple[Span | None, Span]]:
    """Return each receive with the send of its message, or None if the spans lack the send.

    If several spans send the message, the send is the last one that ends no later than the receive.
    """
    sends: dict[Message | None, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=attrgetter("end_s")):
        if span.action.op.is_send:
            sends[span.action.message].append(span)
    matched: list[tuple[Span | None, Span]] = []
    for span in (span for span in spans if span.action.op.is_receive):
        candidates = sends.get(span.action.message, [])
        last = bisect_right(candidates, span.end_s, key=attrgetter("end_s")) - 1
        matched.append((candidates[max(last, 0)] if candidates else None, span))
    return matched


def _by_worker(passes: Iterable[Interval]) -> dict[int, list[Interval]]:
    lanes: dict[int, list[Interval]] = defaultdict(list)
    for interval in sorted(passes, key=attrgetter("start_s")):
        lanes[interval.worker].append(interval)
    return lanes


def _sums(spans: Iterable[Span]) -> Iterator[Interval]:
    """Yield an interval for each sum on each worker; a measured sum has a span for each message."""
    ends: dict[Action, dict[int, tuple[float, float]]] = defaultdict(dict)
    for span in (span for span in spans if span.action.op is Op.ALL_REDUCE):
        lo, hi = ends[span.action].get(span.worker, (span.start_s, span.end_s))
        ends[span.action][span.worker] = min(lo, span.start_s), max(hi, span.end_s)
    for action, workers in ends.items():
        begin_s = max(lo for lo, _ in workers.values())
        for worker, (_, hi) in workers.items():
            if begin_s < hi:
                yield Interval(Kind.SUM, worker, action, begin_s, hi)


def _transfers(spans: Sequence[Span], lanes: Mapping[int, list[Interval]]) -> Iterator[Interval]:
    ends = {worker: sorted(interval.end_s for interval in lane) for worker, lane in lanes.items()}
    for send, receive in pair_messages(spans):
        parts = [(receive.start_s, receive.end_s)]
        if send is not None:
            lane_ends = ends.get(receive.worker, [])
            before = bisect_right(lane_ends, receive.start_s)
            free_s = lane_ends[before - 1] if before else send.end_s
            again_s = max(send.end_s, free_s) if _has_length(receive) else receive.end_s
            parts = [(send.start_s, send.end_s), (again_s, receive.end_s)]
            if again_s == send.end_s:
                parts = [(send.start_s, max(send.end_s, receive.end_s))]
        for lo, hi in parts:
            if lo < hi:
                yield Interval(Kind.TRANSFER, receive.worker, receive.action, lo, hi)


def _has_length(span: Span) -> bool:
    """Return whether a receive takes time; a predicted receive of a waiting message takes none."""
    return span.end_s > span.start_s


def _waits(
    lanes: Mapping[int, list[Interval]], others: Iterable[Interval], begin_s: float
) -> Iterator[Interval]:
    needed: dict[tuple[int, Action | None], list[Interval]] = defaultdict(list)
    for interval in sorted(others, key=attrgetter("start_s")):
        single = interval.action.op in RECEIVES.values()
        needed[interval.worker, interval.action if single else None].append(interval)
    for worker, lane in lanes.items():
        free_s = begin_s
        for interval in lane:
            stage, op, number = interval.action.stage, interval.action.op, interval.action.number
            receive = Action(stage, RECEIVES[op], number) if op in RECEIVES else None
            busy = [] if op is Op.BACKWARD_WEIGHT else needed.get((worker, receive), [])
            for lo, hi in _free_parts(free_s, interval.start_s, busy):
                yield Interval(Kind.WAIT, worker, interval.action, lo, hi)
            free_s = max(free_s, interval.end_s)


def _free_parts(lo: float, hi: float, busy: Iterable[Interval]) -> Iterator[tuple[float, float]]:
    """Yield the parts of lo..hi that no interval of `busy` covers; `busy` is sorted by starts."""
    for start_s, end_s in [*((interval.start_s, interval.end_s) for interval in busy), (hi, hi)]:
        if lo < min(start_s, hi):
            yield lo, min(start_s, hi)
        lo = max(lo, end_s)
