"""Use: the shares of a step in which each device computes, receives, sums and waits.

A timeline of a stream begins with an empty pipeline and ends with an empty pipeline. So only the
time counts from the moment when all devices have begun to compute until the first of them ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hetpipe.plan.plan import Plan
from hetpipe.report.intervals import Interval, Kind, intervals
from hetpipe.report.trace import BACKWARDS
from hetpipe.schedule.action import Action, Op
from hetpipe.simulate.timeline import Timeline

Part = tuple[float, float]  # begin and end, in seconds
COMPUTING = {Kind.FORWARD, *BACKWARDS, Kind.UPDATE}


@dataclass(frozen=True)
class Use:
    """Shares of a step on one device; together with `rest` they are 1.

    `waits` has a share for each cause. A device is `receiving` if it waits for a message that is
    under way. `rest` is the time after the device's last pass, and hetpipe's own work.
    """

    device: str
    computing: float
    receiving: float = 0.0
    summing: float = 0.0
    waits: Mapping[str, float] = field(default_factory=dict)

    @property
    def waiting(self) -> float:
        """The share in which the device waits for something that has not left yet."""
        return sum(self.waits.values())

    @property
    def rest(self) -> float:
        """The share that is none of the other shares."""
        return max(0.0, 1 - self.computing - self.receiving - self.summing - self.waiting)


@dataclass(frozen=True)
class Traffic:
    """The messages from one stage to a neighbour, in one step.

    `seconds` is the time for which at least one of them is under way; `share` is its part of the
    step. Both are None without a timeline.
    """

    source: str
    target: str
    nbytes: int
    seconds: float | None
    share: float | None


class Activity:
    """The activity of devices in a timeline."""

    def __init__(self, timeline: Timeline, plan: Plan) -> None:
        self._plan = plan
        self._names = [row.partition(" lane ")[0] for row in timeline.workers]
        self._intervals = intervals(timeline)
        self._begin_s, self._end_s = self._window(timeline)
        self._overhead_s = timeline.overhead_s if plan.rule.flushes else 0.0

    def uses(self) -> tuple[Use, ...]:
        """Return the use of each device, in the timeline's order."""
        return tuple(self._use(name) for name in dict.fromkeys(self._names))

    @property
    def has_backwards(self) -> bool:
        """Whether the timeline has a backward; predictions have none."""
        return any(each.kind in BACKWARDS for each in self._intervals)

    def under_way(self, source: int, target: int) -> float:
        """Return the share of the time in which a message between two stages is under way."""
        parts = [
            (each.start_s, each.end_s)
            for each in self._intervals
            if each.kind is Kind.TRANSFER
            and (message := each.action.message) is not None
            and (message.source, message.target) == (source, target)
        ]
        return self._share(union(parts))

    def _window(self, timeline: Timeline) -> Part:
        begin_s = min((span.start_s for span in timeline.spans), default=0.0)
        end_s = max((span.end_s for span in timeline.spans), default=0.0)
        if not self._plan.rule.flushes:
            passes: dict[str, list[Interval]] = defaultdict(list)
            for each in self._intervals:
                if each.kind in COMPUTING:
                    passes[self._names[each.worker]].append(each)
            firsts_s = [min(each.start_s for each in own) for own in passes.values()]
            lasts_s = [max(each.end_s for each in own) for own in passes.values()]
            if firsts_s and max(firsts_s) < min(lasts_s):
                return max(firsts_s), min(lasts_s)
        return begin_s, end_s

    def _share(self, parts: Iterable[Part]) -> float:
        whole_s = self._end_s - self._begin_s + self._overhead_s
        inside = ((max(lo, self._begin_s), min(hi, self._end_s)) for lo, hi in parts)
        return sum(max(0.0, hi - lo) for lo, hi in inside) / whole_s if whole_s > 0 else 0.0

    def _use(self, name: str) -> Use:
        by_kind: dict[str, list[Part]] = defaultdict(list)
        for each in self._intervals:
            if self._names[each.worker] == name:
                by_kind[self._kind(each)].append((each.start_s, each.end_s))
        counted: list[Part] = []  # every moment counts once, because lanes run side by side
        shares = {}
        causes = sorted(by_kind.keys() - {_COMPUTING, _RECEIVING, _SUMMING})
        for kind in (_COMPUTING, *causes, _RECEIVING, _SUMMING):
            parts = minus(union(by_kind.get(kind, [])), counted)
            shares[kind] = self._share(parts)
            counted = union([*counted, *parts])
        waits = {cause: shares[cause] for cause in causes if shares[cause] > 0}
        return Use(name, shares[_COMPUTING], shares[_RECEIVING], shares[_SUMMING], waits)

    def _kind(self, each: Interval) -> str:
        if each.kind in COMPUTING:
            return _COMPUTING
        if each.kind in (Kind.WAIT, Kind.LOSS):
            return cause_of(each.action, self._plan)
        return _RECEIVING if each.kind is Kind.TRANSFER else _SUMMING


_COMPUTING, _RECEIVING, _SUMMING = "computing", "receiving", "summing"


def cause_of(delayed: Action, plan: Plan) -> str:
    """Name the thing for which a pass waits."""
    stage, op = delayed.stage, delayed.op
    if op is Op.LOSS:
        return "the loss of the mini-batch, outside of the devices"
    if op is Op.UPDATE:
        return "the losses and gradients of the mini-batch"
    if op is Op.FORWARD and stage > 0:
        return f"inputs from {_devices(plan, stage - 1)}"
    if op in (Op.BACKWARD, Op.BACKWARD_INPUT) and stage + 1 < len(plan.stages):
        return f"gradients from {_devices(plan, stage + 1)}"
    return "its turn, a busy core or hetpipe's own work"


def traffic(plan: Plan, activity: Activity | None, step_s: float | None) -> tuple[Traffic, ...]:
    """Return the messages over each cut; none if one device has both sides.

    They go in both directions, unless the timeline has no backward.
    """
    found, both = [], activity is None or activity.has_backwards
    for cut, nbytes in enumerate(plan.cut_nbytes):
        if plan.stages[cut].devices == plan.stages[cut + 1].devices:
            continue
        for source, target in ((cut, cut + 1), (cut + 1, cut))[: 1 + both]:
            share = None if activity is None else activity.under_way(source, target)
            seconds = None if share is None or step_s is None else share * step_s
            ends = _devices(plan, source), _devices(plan, target)
            found.append(Traffic(*ends, plan.microbatches * nbytes, seconds, share))
    return tuple(found)


def _devices(plan: Plan, stage: int) -> str:
    return " + ".join(plan.stages[stage].devices)


def union(parts: Iterable[Part]) -> list[Part]:
    """Return the moments that any part covers, as separate parts in order."""
    joined: list[Part] = []
    for lo, hi in sorted(parts):
        if joined and lo <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(hi, joined[-1][1])
        else:
            joined.append((lo, hi))
    return joined


def minus(parts: Sequence[Part], others: Sequence[Part]) -> list[Part]:
    """Return the moments of `parts` that `others` do not cover; both are in order and separate."""
    left: list[Part] = []
    first = 0
    for lo, hi in parts:
        while first < len(others) and others[first][1] <= lo:
            first += 1
        at = first
        while at < len(others) and others[at][0] < hi:
            if lo < others[at][0]:
                left.append((lo, others[at][0]))
            lo = max(lo, others[at][1])
            at += 1
        if lo < hi:
            left.append((lo, hi))
    return left
