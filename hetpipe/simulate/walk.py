"""A walk through a plain schedule: the simulator's rules, without its clock.

Where every worker has one row, no device streams and replicas sum nothing, no clock can change the
order in which a worker or an edge does its work. So each row is walked until it waits for a message
that has not been posted, and all times follow as it goes.
"""

from __future__ import annotations

from collections import deque

from hetpipe.schedule.action import Action, Message, Op, Schedule
from hetpipe.schedule.lanes import HAND_OVERS
from hetpipe.simulate.timeline import Span
from hetpipe.simulate.times import StageTimes

_OTHERS = {*HAND_OVERS, Op.ALL_REDUCE, Op.SEND_GRAD, Op.RECV_GRAD}
"""Operations that need the clock."""


def walk(schedule: Schedule, times: StageTimes) -> list[Span] | None:
    """The spans of all actions; None if the schedule needs the clock, or deadlocks."""
    row_of: dict[int, int] = {}
    for number, row in enumerate(schedule):
        for stage in {action.stage for action in row}:
            if row_of.setdefault(stage, number) != number:
                return None
    used = {action.op for row in schedule for action in row}
    if used & _OTHERS or any(chunks != 1 for chunks in times.chunks):
        return None
    board = _Board()
    rows = [_Row(number, row, row_of, times, board) for number, row in enumerate(schedule)]
    board.ready.extend(rows)
    while board.ready:
        board.ready.popleft().advance()
    if any(row.left for row in rows):
        return None
    return [span for row in rows for span in row.spans]


class _Board:
    """The messages that have been posted, the rows that wait for others, and those that go on."""

    def __init__(self) -> None:
        self.arrivals_s: dict[Message, float] = {}
        self.waiting: dict[Message, _Row] = {}
        self.ready: deque[_Row] = deque()


class _Row:
    """A row of actions, the time at its present one, and the edges on which it sends."""

    def __init__(
        self,
        number: int,
        actions: tuple[Action, ...],
        row_of: dict[int, int],
        times: StageTimes,
        board: _Board,
    ) -> None:
        self.spans: list[Span] = []
        self._number = number
        self._actions = actions
        self._row_of = row_of
        self._times = times
        self._board = board
        self._now_s = 0.0
        self._free_s: dict[int, float] = {}  # when an edge is free again, by the row at its end
        self._compute_s: dict[tuple[Op, int], float] = {}

    @property
    def left(self) -> bool:
        """Whether some actions have not been done."""
        return len(self.spans) < len(self._actions)

    def advance(self) -> None:
        """Go on until the row waits, or ends."""
        board = self._board
        for index in range(len(self.spans), len(self._actions)):
            action = self._actions[index]
            message = action.message
            if message is None:
                start_s, end_s = self._now_s, self._computed_s(action)
                self._now_s = end_s
            elif action.op.is_send:
                start_s, end_s = self._post(message)
                board.arrivals_s[message] = end_s
                if message in board.waiting:
                    board.ready.append(board.waiting.pop(message))
            else:
                arrival_s = board.arrivals_s.get(message)
                if arrival_s is None:
                    board.waiting[message] = self
                    return
                start_s = self._now_s
                self._now_s = end_s = max(start_s, arrival_s)
            self.spans.append(Span(self._number, action, start_s, end_s))

    def _computed_s(self, action: Action) -> float:
        """When a pass or update ends that begins now."""
        key = action.op, action.stage
        seconds = self._compute_s.get(key)
        if seconds is None:
            seconds = self._compute_s[key] = self._times.compute_s(action)
        return self._now_s + seconds

    def _post(self, message: Message) -> tuple[float, float]:
        """When a message that is posted now leaves and arrives; within a worker it is free."""
        target = self._row_of[message.target]
        if target == self._number:
            return self._now_s, self._now_s
        transfer = self._times.transfer(message)
        start_s = max(self._now_s, self._free_s.get(target, 0.0))
        self._free_s[target] = left_s = start_s + transfer.occupancy_s
        return start_s, left_s + transfer.latency_s
