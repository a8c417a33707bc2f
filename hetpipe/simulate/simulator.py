"""Simulator: a schedule on a virtual clock.

The rules are the engine's:

- A worker does its actions in order. A compute action holds the worker. A send is posted and costs
  the worker nothing. A receive holds the worker until the message has arrived.
- An edge is one direction between two workers. It carries one message at a time, in the order of
  posting. A message in chunks holds its edge from the first chunk until the last has left.
- The lanes of a worker run at once. While several compute, each has an even share of its speed.
- A worker does one sum over replicas at a time, beside the passes that follow. An update waits for
  the sums. Where replicas have a row each, a sum begins when all of them have come to it.
- A replica that sends a gradient to all the others uses an edge of its own to each of them.

Plain schedules need no clock (`hetpipe.simulate.walk`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from operator import itemgetter

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import AFTER_SUMS, Action, Message, Op, Schedule
from hetpipe.schedule.lanes import row_names, row_workers
from hetpipe.simulate.timeline import Span, Timeline
from hetpipe.simulate.times import StageTimes
from hetpipe.simulate.walk import walk

ARRIVAL, RESUME = 0, 1  # at one instant messages arrive before workers look for them

MAKERS = {"F": (Op.FORWARD,), "B": (Op.BACKWARD, Op.BACKWARD_INPUT)}  # by kind of message


class _Clock:
    """Events in the order of (time, priority, id): the same input gives the same run, always."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, priority: int, then: Callable[[], None]) -> None:
        heappush(self._events, (time_s, priority, self._count, then))
        self._count += 1

    def run(self) -> None:
        while self._events:
            self.now_s, _, _, then = heappop(self._events)
            then()


class _Device:
    """The device of one worker: the lanes that compute at the same time share it evenly."""

    def __init__(self, clock: _Clock) -> None:
        self._clock = clock
        self._left_s: dict[_Lane, float] = {}  # seconds still to compute at full speed
        self._since_s = 0.0  # the time at which `_left_s` was right
        self._changes = 0

    def begin(self, lane: _Lane, compute_s: float) -> None:
        """Call the lane's `computed` after `compute_s` seconds of the whole device."""
        self._elapse()
        self._left_s[lane] = compute_s
        self._await()

    def _elapse(self) -> None:
        share_s = (self._clock.now_s - self._since_s) / max(1, len(self._left_s))
        for lane in self._left_s:
            self._left_s[lane] = max(0.0, self._left_s[lane] - share_s)
        self._since_s = self._clock.now_s

    def _await(self) -> None:
        self._changes += 1
        if self._left_s:
            change, first = self._changes, min(self._left_s, key=self._left_s.__getitem__)
            end_s = self._clock.now_s + self._left_s[first] * len(self._left_s)
            self._clock.at(end_s, RESUME, lambda: self._end(first, change))

    def _end(self, lane: _Lane, change: int) -> None:
        if change == self._changes:  # nobody has begun since
            self._elapse()
            del self._left_s[lane]
            self._await()
            lane.computed()


class _Lane:
    def __init__(self, index: int, row: Sequence[Action], device: _Device, run: _Run) -> None:
        self.index = index
        self._row = row
        self._device = device
        self._run = run
        self._next = 0
        self.waiting: Message | None = None
        self._sums = 0  # begun and not done
        self._waits_for_sums = False
        self._since_s = 0.0  # when the wait, or the last compute, began

    @property
    def current(self) -> Action | None:
        """The action it is at; None at the end."""
        return self._row[self._next] if self._next < len(self._row) else None

    def resume(self) -> None:
        """Go on until something takes time."""
        clock = self._run.clock
        while (action := self.current) is not None:
            message = action.message
            if action.op in AFTER_SUMS and self._sums:
                self._waits_for_sums = True
                return
            if action.op is Op.ALL_REDUCE:
                self._sums += 1
                self._run.gather(self, action)
            elif message is None:
                self._since_s = clock.now_s
                self._device.begin(self, self._run.times.compute_s(action))
                return
            elif action.op.is_send:
                self._run.post(self, action, message)
            elif (message, self.index) in self._run.arrived:
                self._run.record(self.index, action, clock.now_s, clock.now_s)
            else:
                self.waiting, self._since_s = message, clock.now_s
                return
            self._next += 1

    def summed(self) -> None:
        """A sum over replicas is done."""
        self._sums -= 1
        if self._waits_for_sums and not self._sums:
            self._waits_for_sums = False
            self.resume()

    def computed(self) -> None:
        """The device has done the action."""
        action = self.current
        assert action is not None
        self._run.record(self.index, action, self._since_s, self._run.clock.now_s)
        self._next += 1
        self.resume()

    def made_since_s(self, message: Message) -> float:
        """When the message's own pass began; now, if that pass was not the action before."""
        makers = [Action(message.source, op, message.number) for op in MAKERS.get(message.kind, ())]
        before = self._row[self._next - 1] if self._next else None
        return self._since_s if before in makers else self._run.clock.now_s

    def arrive(self) -> None:
        """The message for which it waits has arrived."""
        action = self.current
        assert action is not None
        self.waiting = None
        self._run.record(self.index, action, self._since_s, self._run.clock.now_s)
        self._next += 1
        self._run.clock.at(self._run.clock.now_s, RESUME, self.resume)


class _Run:
    """One simulation: its clock, workers and edges, and the recorded spans."""

    def __init__(self, schedule: Schedule, times: StageTimes) -> None:
        self.times = times
        self.clock = _Clock()
        self.arrived: set[tuple[Message, int]] = set()  # with the lane that receives it
        self.spans: list[Span] = []
        self._workers = row_workers(schedule)
        cells = [(index, action) for index, row in enumerate(schedule) for action in row]
        self._targets: dict[Message, list[int]] = defaultdict(list)  # the lanes that receive it
        for index, message in ((i, a.message) for i, a in cells if a.op.is_receive):
            if message is not None:
                self._targets[message].append(index)
        self._takers = Counter(action for _, action in cells if action.op is Op.ALL_REDUCE)
        self._gathering: dict[Action, list[_Lane]] = defaultdict(list)
        self._summing_s: dict[int, float] = defaultdict(float)  # when a worker's sums end
        self._edge_free_s: dict[tuple[int, int], float] = defaultdict(float)
        devices = [_Device(self.clock) for _ in set(self._workers)]
        self.lanes = [
            _Lane(index, row, devices[self._workers[index]], self)
            for index, row in enumerate(schedule)
        ]
        for lane in self.lanes:
            self.clock.at(0.0, RESUME, lane.resume)

    def record(self, lane: int, action: Action, start_s: float, end_s: float) -> None:
        self.spans.append(Span(lane, action, start_s, end_s))

    def gather(self, lane: _Lane, action: Action) -> None:
        """A lane has come to a sum; the last begins it."""
        lanes = self._gathering[action]
        lanes.append(lane)
        if len(lanes) < self._takers[action]:
            return
        workers = [self._workers[lane.index] for lane in lanes]
        start_s = max(self.clock.now_s, *(self._summing_s[worker] for worker in workers))
        end_s = start_s + self.times.compute_s(action)
        for lane, worker in zip(lanes, workers, strict=True):
            self._summing_s[worker] = end_s
            self.record(lane.index, action, start_s, end_s)
            self.clock.at(end_s, RESUME, lane.summed)

    def post(self, lane: _Lane, action: Action, message: Message) -> None:
        """Put a message on its edges, after those already there; within a worker it is free."""
        for target in self._targets[message]:
            self._post(lane, action, message, target)

    def _post(self, lane: _Lane, action: Action, message: Message, target: int) -> None:
        edge = self._workers[lane.index], self._workers[target]
        transfer = self.times.transfer(message)
        start_s = end_s = now_s = self.clock.now_s
        if edge[0] != edge[1]:
            chunks = self.times.chunks[message.source] if self.times.chunks else 1
            early = 1 - 1 / chunks  # the share of the pass that follows its first chunk
            first_s = now_s - early * (now_s - lane.made_since_s(message)) if early else now_s
            start_s = max(first_s, self._edge_free_s[edge])
            left_s = max(start_s, now_s - early * transfer.occupancy_s) + transfer.occupancy_s
            self._edge_free_s[edge] = left_s
            end_s = left_s + transfer.latency_s
        self.record(lane.index, action, start_s, end_s)
        if end_s == self.clock.now_s:
            self._deliver(message, target)
        else:
            self.clock.at(end_s, ARRIVAL, lambda: self._deliver(message, target))

    def _deliver(self, message: Message, target: int) -> None:
        self.arrived.add((message, target))
        if self.lanes[target].waiting == message:
            self.lanes[target].arrive()


def simulate(
    schedule: Schedule,
    times: StageTimes,
    *,
    workers: Sequence[str] = (),
    label: str = "predicted",
) -> Timeline:
    """The timeline of one mini-batch, a row per lane. `workers` names them; default `worker 0`, ...

    A compute action's span lasts while it holds the worker. A send's lasts from the moment when the
    edge takes the message to the arrival, a receive's from the moment when the worker comes to it
    to the arrival. Raises `ScheduleError` if the schedule deadlocks, or if stages or names do not
    match `times`.
    """
    stages = 1 + max((action.stage for row in schedule for action in row), default=-1)
    count = len(set(row_workers(schedule)))
    if stages != len(times.forward_s) or len(workers) not in (0, count):
        raise ScheduleError(
            f"the schedule has {stages} stages on {count} workers, but there are times for "
            f"{len(times.forward_s)} stages and names for {len(workers) or count} workers"
        )
    names = row_names(schedule, workers)
    spans = walk(schedule, times) or _by_clock(schedule, times, names)
    spans.sort(key=itemgetter(2, 3, 0))
    return Timeline(names, tuple(spans), label, times.step_overhead_s)


def _by_clock(schedule: Schedule, times: StageTimes, names: Sequence[str]) -> list[Span]:
    """The spans of any schedule. Raises `ScheduleError` for a deadlock."""
    run = _Run(schedule, times)
    run.clock.run()
    for lane in run.lanes:
        if lane.current is not None:
            raise ScheduleError(f"{names[lane.index]} waits for ever in {lane.current}")
    return run.spans
