"""Simulator: a schedule on a virtual clock.

The rules are the engine's. A worker does its actions in order. A compute action holds it; a send is
posted and costs it nothing; a receive holds it until the message has arrived. Each edge, that is,
each direction between two workers, carries one message at a time, in the order of posting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Message, Schedule
from hetpipe.simulate.timeline import Span, Timeline
from hetpipe.simulate.times import StageTimes

ARRIVAL, RESUME = 0, 1  # at one instant messages arrive before workers look for them


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


class _Worker:
    def __init__(self, index: int, row: Sequence[Action], run: _Run) -> None:
        self.index = index
        self._row = row
        self._run = run
        self._next = 0
        self.waiting: Message | None = None
        self._since_s = 0.0  # when the wait began

    @property
    def current(self) -> Action | None:
        """The action it is at; None at the end."""
        return self._row[self._next] if self._next < len(self._row) else None

    def resume(self) -> None:
        """Go on until something takes time."""
        clock = self._run.clock
        while (action := self.current) is not None:
            message = action.message
            if message is None:
                end_s = clock.now_s + self._run.times.compute_s(action)
                self._run.record(self.index, action, clock.now_s, end_s)
                self._next += 1
                clock.at(end_s, RESUME, self.resume)
                return
            if action.op.is_send:
                self._run.post(self.index, action, message)
            elif message in self._run.arrived:
                self._run.record(self.index, action, clock.now_s, clock.now_s)
            else:
                self.waiting, self._since_s = message, clock.now_s
                return
            self._next += 1

    def arrive(self) -> None:
        """What it waited for is there."""
        action = self.current
        assert action is not None
        self.waiting = None
        self._run.record(self.index, action, self._since_s, self._run.clock.now_s)
        self._next += 1
        self._run.clock.at(self._run.clock.now_s, RESUME, self.resume)


class _Run:
    """One simulation: clock, workers, edges and what they record."""

    def __init__(self, schedule: Schedule, times: StageTimes) -> None:
        self.times = times
        self.clock = _Clock()
        self.arrived: set[Message] = set()
        self.spans: list[tuple[int, Action, float, float]] = []
        self._home = {a.stage: w for w, row in enumerate(schedule) for a in row}
        self._edge_free_s: dict[tuple[int, int], float] = defaultdict(float)
        self.workers = [_Worker(index, row, self) for index, row in enumerate(schedule)]
        for worker in self.workers:
            self.clock.at(0.0, RESUME, worker.resume)

    def record(self, worker: int, action: Action, start_s: float, end_s: float) -> None:
        self.spans.append((worker, action, start_s, end_s))

    def post(self, worker: int, action: Action, message: Message) -> None:
        """Put a message on its edge, behind those already there; on one worker it is free."""
        target = self._home[message.target]
        transfer = self.times.transfer(message)
        start_s = end_s = self.clock.now_s
        if target != worker:
            start_s = max(start_s, self._edge_free_s[worker, target])
            self._edge_free_s[worker, target] = start_s + transfer.occupancy_s
            end_s = start_s + transfer.occupancy_s + transfer.latency_s
        self.record(worker, action, start_s, end_s)
        if end_s == self.clock.now_s:
            self._deliver(message)
        else:
            self.clock.at(end_s, ARRIVAL, lambda: self._deliver(message))

    def _deliver(self, message: Message) -> None:
        self.arrived.add(message)
        receiver = self.workers[self._home[message.target]]
        if receiver.waiting == message:
            receiver.arrive()


def simulate(
    schedule: Schedule,
    times: StageTimes,
    *,
    workers: Sequence[str] = (),
    label: str = "predicted",
) -> Timeline:
    """The timeline of one mini-batch. `workers` names them; default `worker 0`, ...

    Spans: compute while it holds the worker; a send from when the edge takes it until it arrives;
    a receive from when the worker comes to it until the arrival. Raises `ScheduleError` where the
    schedule deadlocks or speaks of stages that `times` lacks.
    """
    names = tuple(workers) or tuple(f"worker {index}" for index in range(len(schedule)))
    stages = 1 + max((action.stage for row in schedule for action in row), default=-1)
    if stages != len(times.forward_s) or len(names) != len(schedule):
        raise ScheduleError(
            f"the schedule has {stages} stages on {len(schedule)} workers, but there are times for "
            f"{len(times.forward_s)} stages and names for {len(names)} workers"
        )
    run = _Run(schedule, times)
    run.clock.run()
    for worker in run.workers:
        if worker.current is not None:
            raise ScheduleError(f"{names[worker.index]} waits for ever in {worker.current}")
    spans = sorted(run.spans, key=lambda span: (span[2], span[3], span[0]))
    return Timeline(
        names,
        tuple(Span(*span) for span in spans),
        label,
        times.step_overhead_s,
    )
