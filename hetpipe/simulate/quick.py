"""The length of a step without its timeline, by the rules of the simulator, in one walk.

Under a schedule that flushes, with one lane per worker, every worker and every link between two
does its work in an order that no clock can change. So the actions of a step are brought into one
order, each after all that it waits for. Then each end is the later of two times, plus a duration.
Schedules with lanes, sums over replicas or messages in pieces are left to the simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op
from hetpipe.schedule.complete import Pair
from hetpipe.schedule.rule import Rule
from hetpipe.simulate.times import FREE, StageTimes, Transfer

KEPT = 256
"""The number of orders that are remembered, the latest ones."""

_PASSES = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


class _Action(NamedTuple):
    """An action of a worker: it may wait for a message, take a duration, and post a message."""

    worker: int
    awaited: int | None  # a message, by number
    duration: tuple[Op, int] | None  # operation and stage
    posted: int | None
    edge: tuple[int, int] | None  # workers; None where both stages are on one
    transfer: tuple[str, int, int] | None  # kind, source and target stage


@dataclass(frozen=True)
class Order:
    """The actions of a step, each after all that it waits for."""

    actions: tuple[_Action, ...]
    workers: int
    messages: int

    def step_s(self, times: StageTimes) -> float:
        """Seconds of a step without the controller's overhead; `times` has no chunks."""
        ends_s = [0.0] * self.workers
        arrivals_s = [0.0] * self.messages
        edges_s: dict[tuple[int, int], float] = {}
        durations_s = _durations_s(times)
        transfers: dict[tuple[str, int, int], Transfer] = {}
        latest_s = 0.0
        for worker, awaited, duration, posted, edge, way in self.actions:
            now_s = ends_s[worker]
            if awaited is not None and arrivals_s[awaited] > now_s:
                now_s = arrivals_s[awaited]
            if duration is not None:
                now_s += durations_s[duration]
            ends_s[worker] = now_s
            if posted is not None:
                if edge is not None:
                    assert way is not None
                    transfer = transfers.get(way) or transfers.setdefault(way, _way(times, way))
                    start_s = max(now_s, edges_s.get(edge, 0.0))
                    edges_s[edge] = left_s = start_s + transfer.occupancy_s
                    now_s = left_s + transfer.latency_s
                arrivals_s[posted] = now_s
            if now_s > latest_s:
                latest_s = now_s
        return latest_s


@lru_cache(KEPT)
def order_of(
    rule: Rule,
    stages: int,
    microbatches: int,
    in_flight: tuple[int, ...],
    workers: int,
    pairs: tuple[Pair, ...] = (),
) -> Order | None:
    """The order of a step under a rule; None if only the simulator can price it.

    `pairs` are stages that share parameters. Raises `ScheduleError` if the rule does.
    """
    if not rule.flushes:
        return None
    rows = rule.rows(stages, microbatches, in_flight, workers)
    if len(rows) != workers or any(a.op not in _PASSES for row in rows for a in row):
        return None
    return _Ordering(rows, stages, pairs).order()


class _Ordering:
    """Brings the actions of all workers into one order."""

    def __init__(
        self, rows: Sequence[Sequence[Action]], stages: int, pairs: Sequence[Pair]
    ) -> None:
        self._stages = stages
        self._worker_of = {a.stage: worker for worker, row in enumerate(rows) for a in row}
        self._numbers: dict[tuple[str, int, int, int], int] = {}  # of messages
        self._rows = [
            [*(self._pass(worker, a) for a in row), *self._end(worker, row, pairs)]
            for worker, row in enumerate(rows)
        ]

    def order(self) -> Order:
        """Walk all rows at once. Raises `ScheduleError` if they deadlock."""
        position = [0] * len(self._rows)
        posted: set[int] = set()
        actions: list[_Action] = []
        moved = True
        while moved:
            moved = False
            for worker, row in enumerate(self._rows):
                while position[worker] < len(row):
                    action = row[position[worker]]
                    if action.awaited is not None and action.awaited not in posted:
                        break
                    if action.posted is not None:
                        posted.add(action.posted)
                    actions.append(action)
                    position[worker] += 1
                    moved = True
        for worker, row in enumerate(self._rows):
            if position[worker] < len(row):
                raise ScheduleError(f"worker {worker} waits for ever: the schedule deadlocks")
        return Order(tuple(actions), len(self._rows), len(self._numbers))

    def _pass(self, worker: int, action: Action) -> _Action:
        n, op, m = action.stage, action.op, action.number
        awaited = sent = None
        if op is Op.FORWARD:
            awaited = ("F", n - 1, n) if n > 0 else None
            sent = ("F", n, n + 1) if n + 1 < self._stages else None
        elif op is not Op.BACKWARD_WEIGHT:
            awaited = ("B", n + 1, n) if n + 1 < self._stages else None
            sent = ("B", n, n - 1) if n > 0 else None
        return self._action(worker, awaited, (op, n), sent, m)

    def _end(self, worker: int, row: Sequence[Action], pairs: Sequence[Pair]) -> list[_Action]:
        """Updates, and tied gradients and parameters, as `complete.flushed` orders them."""
        own = sorted({action.stage for action in row})
        owned = [pair for stage in own for pair in pairs if pair[0] == stage]
        borrowed = [pair for stage in own for pair in pairs if pair[1] == stage]
        return [
            *(self._action(worker, None, None, ("G", b, o)) for o, b in borrowed),
            *(self._action(worker, ("G", b, o), None, None) for o, b in owned),
            *(self._action(worker, None, (Op.UPDATE, stage), None) for stage in own),
            *(self._action(worker, None, None, ("P", o, b)) for o, b in owned),
            *(self._action(worker, ("P", o, b), None, None) for o, b in borrowed),
        ]

    def _action(
        self,
        worker: int,
        awaited: tuple[str, int, int] | None,
        duration: tuple[Op, int] | None,
        sent: tuple[str, int, int] | None,
        microbatch: int = 0,
    ) -> _Action:
        numbers = self._numbers
        waits = posts = edge = None
        if awaited is not None:
            waits = numbers.setdefault((*awaited, microbatch), len(numbers))
        if sent is not None:
            posts = numbers.setdefault((*sent, microbatch), len(numbers))
            workers = worker, self._worker_of[sent[2]]
            edge = workers if workers[0] != workers[1] else None
        return _Action(worker, waits, duration, posts, edge, sent)


def _durations_s(times: StageTimes) -> dict[tuple[Op, int], float]:
    ops = (*_PASSES, Op.UPDATE)
    stages = range(len(times.forward_s))
    return {(op, n): times.compute_s(Action(n, op)) for op in ops for n in stages}


def _way(times: StageTimes, way: tuple[str, int, int]) -> Transfer:
    kind, source, target = way
    if kind == "F":
        return times.forward_links[source] if times.forward_links else FREE
    if kind == "B":
        return times.backward_links[target] if times.backward_links else FREE
    return times.tied.get((source, target), FREE)
