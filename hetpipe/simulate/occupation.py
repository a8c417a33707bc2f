"""Occupation: the share of a step in which workers compute, and why they do not in the rest."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hetpipe.schedule.action import Action, Op
from hetpipe.simulate.timeline import Timeline

BEFORE = {
    Op.FORWARD: Op.RECV_FORWARD,
    Op.BACKWARD: Op.RECV_BACKWARD,
    Op.BACKWARD_INPUT: Op.RECV_BACKWARD,
}
"""The receive that a pass may need."""


@dataclass(frozen=True)
class Occupation:
    """Shares of a step, means over the workers; their sum is 1.

    A worker that does not compute waits for a message that has not left yet (`waiting`, for another
    worker or at the step's end) or is under way (`transfer`). All other time is the `engine`'s,
    including the controller's time before and after the spans.
    """

    computing: float
    transfer: float
    engine: float
    waiting: float

    def __str__(self) -> str:
        return ", ".join(f"{each.name} {getattr(self, each.name):.1%}" for each in fields(self))


def occupation(timeline: Timeline) -> Occupation:
    """Return the occupation of a step; the engine has all of it if there are no spans."""
    if not timeline.spans:
        return Occupation(0.0, 0.0, 1.0, 0.0)
    begin_s, end_s = min(s.start_s for s in timeline.spans), max(s.end_s for s in timeline.spans)
    of_action = {span.action: span for span in timeline.spans}
    sends = {s.action.message: s for s in timeline.spans if s.action.op.is_send}
    computing_s = transfer_s = waiting_s = 0.0
    for worker in range(len(timeline.workers)):
        at_s = begin_s  # the worker's time is accounted for until then
        own = [s for s in timeline.spans if s.worker == worker and s.action.op.is_compute]
        for span in sorted(own, key=lambda span: span.start_s):
            receive = of_action.get(_receive_before(span.action))
            if receive is not None and receive is not span:
                arrival_s = _within(receive.end_s, at_s, span.start_s)
                send = sends.get(receive.action.message)
                left_s = arrival_s if send is None else _within(send.start_s, at_s, arrival_s)
                waiting_s += left_s - at_s
                transfer_s += arrival_s - left_s
            computing_s += max(0.0, span.end_s - max(span.start_s, at_s))
            at_s = max(at_s, span.end_s)
        waiting_s += end_s - at_s
    whole_s = timeline.total_s * len(timeline.workers)
    shares = computing_s / whole_s, transfer_s / whole_s, waiting_s / whole_s
    return Occupation(shares[0], shares[1], 1.0 - sum(shares), shares[2])


def _receive_before(action: Action) -> Action:
    """Return the action that receives the input of a pass; the action itself if it needs none."""
    return replace(action, op=BEFORE.get(action.op, action.op))


def _within(time_s: float, lo_s: float, hi_s: float) -> float:
    return min(max(time_s, lo_s), max(lo_s, hi_s))
