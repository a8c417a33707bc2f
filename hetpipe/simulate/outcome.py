"""Outcome: the bubbles and memory of workers, the bytes on links, and the occupation of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Message, Op
from hetpipe.schedule.codes import Array
from hetpipe.schedule.lanes import row_workers
from hetpipe.simulate.timeline import Span, Timeline


@dataclass(frozen=True)
class Memory:
    """Bytes of a stage.

    `resident_nbytes` never changes: weights, gradients, optimizer state, buffers. A micro-batch
    keeps `saved_nbytes` from the start of its forward to the end of its backward. If a backward has
    two halves, the micro-batch keeps `saved_nbytes` until the first half ends, and then
    `deferred_nbytes` until the second half ends. `cut_nbytes` go to the next stage, and as many
    bytes of gradients come back.
    """

    resident_nbytes: int = 0
    saved_nbytes: int = 0
    deferred_nbytes: int = 0
    cut_nbytes: int = 0


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """A worker's bytes over time: `nbytes[i]` from `seconds[i]` to `seconds[i + 1]`."""

    seconds: Array
    nbytes: Array

    @property
    def peak_nbytes(self) -> int:
        """The most bytes at any time."""
        return int(self.nbytes.max())


@dataclass(frozen=True, eq=False)
class Outcome:
    """The outcome of a step, by worker. The bubble of a worker is the share of the step in which it
    does not compute. Lanes of a worker count together.

    Replicas that run the same row count as one worker, since a timeline has one row for them.
    """

    workers: tuple[str, ...]
    step_s: float
    bubble: tuple[float, ...]
    memory: tuple[MemoryUse, ...]
    link_nbytes: Mapping[tuple[int, int], int]
    """Bytes of activations and their gradients, by source and target worker."""

    @property
    def peak_nbytes(self) -> tuple[int, ...]:
        """The most bytes at any time, by worker."""
        return tuple(each.peak_nbytes for each in self.memory)


def outcome(timeline: Timeline, memory: Sequence[Memory]) -> Outcome:
    """Return the outcome of a step, with `memory` by stage. Raises `ScheduleError` if `memory` has
    another number of stages."""
    stages = 1 + max((span.action.stage for span in timeline.spans), default=-1)
    if stages != len(memory):
        raise ScheduleError(
            f"the timeline has {stages} stages, but there is memory for {len(memory)}: give one "
            "entry for each stage"
        )
    rows: list[list[Span]] = [[] for _ in timeline.workers]
    for span in timeline.spans:
        rows[span.worker].append(span)
    worker_of = row_workers(tuple(tuple(span.action for span in row) for row in rows))
    spans: list[list[Span]] = [[] for _ in set(worker_of)]
    for worker, row in zip(worker_of, rows, strict=True):
        spans[worker] += row
    begin_s = min((span.start_s for span in timeline.spans), default=0.0)
    return Outcome(
        _names(timeline.workers, worker_of),
        timeline.step_s,
        tuple(_bubble(own, timeline.step_s) for own in spans),
        tuple(_memory_use(own, memory, begin_s) for own in spans),
        _link_nbytes(timeline.spans, worker_of, memory),
    )


def _names(rows: Sequence[str], worker_of: Sequence[int]) -> tuple[str, ...]:
    """Return the workers' names, without the numbers of lanes."""
    names: dict[int, str] = {}
    for row, worker in zip(rows, worker_of, strict=True):
        several = worker_of.count(worker) > 1
        names.setdefault(worker, row.removesuffix(" lane 0") if several else row)
    return tuple(names.values())


def _bubble(spans: Iterable[Span], step_s: float) -> float:
    """Return the share of a step in which none of these spans computes."""
    busy_s, until_s = 0.0, -np.inf
    computing = [(s.start_s, s.end_s) for s in spans if s.action.op.is_compute]
    for start_s, end_s in sorted(computing):
        busy_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return 1.0 - busy_s / step_s if step_s else 0.0


def _memory_use(spans: Sequence[Span], memory: Sequence[Memory], begin_s: float) -> MemoryUse:
    """Return the bytes of a worker over time. Changes at the same time are added up."""
    stages = {span.action.stage for span in spans}
    changes = Counter({begin_s: sum(memory[stage].resident_nbytes for stage in stages)})
    for _, action, start_s, end_s in spans:
        own = memory[action.stage]
        if action.op is Op.FORWARD:
            changes[start_s] += own.saved_nbytes
        elif action.op is Op.BACKWARD:
            changes[end_s] -= own.saved_nbytes
        elif action.op is Op.BACKWARD_INPUT:
            changes[end_s] -= own.saved_nbytes - own.deferred_nbytes
        elif action.op is Op.BACKWARD_WEIGHT:
            changes[end_s] -= own.deferred_nbytes
    seconds = sorted(changes)
    return MemoryUse(np.array(seconds), np.cumsum([changes[each] for each in seconds]))


def _link_nbytes(
    spans: Sequence[Span], worker_of: Sequence[int], memory: Sequence[Memory]
) -> dict[tuple[int, int], int]:
    """Return the bytes that cross cuts in both directions, by source and target worker."""
    target_of: dict[Message | None, int] = {
        span.action.message: worker_of[span.worker]
        for span in spans
        if span.action.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD)
    }
    nbytes: Counter[tuple[int, int]] = Counter()
    for span in spans:
        message = span.action.message if span.action.op.is_send else None
        if message in target_of and message is not None:
            link = worker_of[span.worker], target_of[message]
            nbytes[link] += memory[min(message.source, message.target)].cut_nbytes
    return {link: count for link, count in nbytes.items() if link[0] != link[1]}


RECEIVES = {
    Op.FORWARD: Op.RECV_FORWARD,
    Op.BACKWARD: Op.RECV_BACKWARD,
    Op.BACKWARD_INPUT: Op.RECV_BACKWARD,
}
"""For each pass, the receive that the pass may need."""


@dataclass(frozen=True)
class Occupation:
    """Shares of a step, means over the workers; their sum is 1.

    `computing` is the share in which workers compute. `waiting`: they wait for a message that has
    not left yet, for a loss over the mini-batch, or for the end of the step. `transfer`: they wait
    for a message that is under way. `engine` is hetpipe's work: all other time, also the
    controller's before and after the spans.
    """

    computing: float
    transfer: float
    engine: float
    waiting: float

    def __str__(self) -> str:
        return ", ".join(f"{each.name} {getattr(self, each.name):.1%}" for each in fields(self))


def occupation(timeline: Timeline) -> Occupation:
    """Return the occupation of a step. Without spans, all time counts as `engine`."""
    if not timeline.spans:
        return Occupation(0.0, 0.0, 1.0, 0.0)
    begin_s, end_s = min(s.start_s for s in timeline.spans), max(s.end_s for s in timeline.spans)
    of_action = {span.action: span for span in timeline.spans}
    sends = {s.action.message: s for s in timeline.spans if s.action.op.is_send}
    computing_s = transfer_s = waiting_s = 0.0
    for worker in range(len(timeline.workers)):
        at_s = begin_s  # the worker's time before this is already counted
        own = [s for s in timeline.spans if s.worker == worker and s.action.op.holds]
        for span in sorted(own, key=lambda span: span.start_s):
            receive = of_action.get(_receive_before(span.action))
            if receive is not None and receive is not span:
                arrival_s = _within(receive.end_s, at_s, span.start_s)
                send = sends.get(receive.action.message)
                left_s = arrival_s if send is None else _within(send.start_s, at_s, arrival_s)
                waiting_s += left_s - at_s
                transfer_s += arrival_s - left_s
            lasts_s = max(0.0, span.end_s - max(span.start_s, at_s))
            if span.action.op is Op.LOSS:
                waiting_s += lasts_s
            else:
                computing_s += lasts_s
            at_s = max(at_s, span.end_s)
        waiting_s += end_s - at_s
    whole_s = timeline.total_s * len(timeline.workers)
    shares = computing_s / whole_s, transfer_s / whole_s, waiting_s / whole_s
    return Occupation(shares[0], shares[1], 1.0 - sum(shares), shares[2])


def _receive_before(action: Action) -> Action:
    """Return the receive that a pass may need; for W and U, the action itself."""
    return replace(action, op=RECEIVES.get(action.op, action.op))


def _within(time_s: float, lo_s: float, hi_s: float) -> float:
    return min(max(time_s, lo_s), max(lo_s, hi_s))
