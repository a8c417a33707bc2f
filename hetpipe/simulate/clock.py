"""Clock: follows the rules of `hetpipe.simulate.simulator`, for any schedule.

Each row is a generator. It runs until an action takes time, and yields the end of that time:

    pass, update, loss  the end of its time; known when it begins, unless lanes share the device
    receive             the arrival of the message; if it is not sent yet, its send sets the event
    after sums          the end of the last sum; if a sum has not begun, that sum sets the event

If no messages share a medium, the end of a message or sum is known when the message or sum is
posted. Otherwise messages and sums have separate events (`hetpipe.simulate.media`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from hetpipe.schedule.action import (
    AFTER_SUMS,
    MOST_NUMBER,
    MOST_STAGE,
    PEERS,
    TIED_OPS,
    Action,
    Message,
    Op,
    Schedule,
)
from hetpipe.simulate.media import ALONE, Channel, Event, Load, Media, Network
from hetpipe.simulate.times import FREE, StageTimes, Transfer

COMPUTE, SEND, RECEIVE, SUM = range(4)  # the effect of an action on its worker

_SENDS = {
    Op.FORWARD: Op.SEND_FORWARD,
    Op.BACKWARD: Op.SEND_BACKWARD,
    Op.BACKWARD_INPUT: Op.SEND_BACKWARD,
}
_KINDS = "FBKVAGP"  # of messages


@dataclass(frozen=True, slots=True)
class StageOp:
    """All actions with one operation and one stage; they differ only in their numbers. So the clock
    computes their costs once, and identifies a message by one integer."""

    code: int
    compute_s: float  # of a pass or an update
    transfer: Transfer | None  # of a message or a sum; None if the cost depends on the number
    chunks: float  # number of chunks in which the stage sends a result
    after_sums: bool  # whether the actions wait for the sums that began before them
    sent_by: Op | None  # the operation that sends the result of a pass
    first_key: int  # key of the message, or the sum, with number 0
    key_step: int  # by how much the key grows from one number to the next
    wraps: bool  # whether the number contains a stage and a mini-batch, see PEERS

    def key(self, number: int) -> int:
        """Return the key of the message, or the sum, with this number."""
        if self.wraps:
            mini_batch, peer = divmod(number, PEERS)
            return self.first_key + self.key_step * peer + mini_batch
        return self.first_key + self.key_step * number


class StageOps(dict[tuple[Op, int], StageOp]):
    """`StageOp` by operation and stage; each is made when it is first used."""

    def __init__(self, times: StageTimes) -> None:
        super().__init__()
        self._times = times

    def __missing__(self, key: tuple[Op, int]) -> StageOp:
        step = self[key] = self._step(*key)
        return step

    def _step(self, op: Op, stage: int) -> StageOp:
        times, first, second = self._times, Action(stage, op, 0), Action(stage, op, 1)
        compute_s, transfer = 0.0, None
        first_key, key_step = stage * (MOST_NUMBER + 1), 1
        if op.holds:
            code, compute_s = COMPUTE, times.compute_s(first)
        elif op is Op.ALL_REDUCE:
            code, transfer = SUM, times.sum_of(stage)
        else:
            code = SEND if op.is_send else RECEIVE
            first_key, key_step = _key(first), _key(second) - _key(first)
            message = first.message
            if op.is_send and message is not None and op not in TIED_OPS:
                transfer = times.transfer(message)
        chunks = times.chunks[stage] if times.chunks else 1
        after_sums = op in AFTER_SUMS
        return StageOp(
            code, compute_s, transfer, chunks, after_sums, _SENDS.get(op), first_key, key_step,
            op in TIED_OPS,
        )  # fmt: skip


def _key(action: Action) -> int:
    """Return the key of an action's message; it grows linearly with the micro-batch, the
    mini-batch, or the stage at the other end."""
    source, target, kind, number = action.message or Message(0, 0, "", 0)
    way = (source * (MOST_STAGE + 2) + target) * len(_KINDS) + _KINDS.index(kind)
    return way * (MOST_NUMBER + 1) + number


RowWalk = Generator[float | None, float, None]
"""Yields the time at which the row resumes, or None if another row sets that time. When the row
resumes, it receives the time."""

NOTHING, SUMS = -1, -2  # special values for the key of the message that a row waits for


class Clock:
    """One simulation. `workers` has the worker of each row. A span is (row, action, start, end)."""

    def __init__(self, schedule: Schedule, times: StageTimes, workers: Sequence[int]) -> None:
        self.spans: list[tuple[int, Action, float, float]] = []
        self._schedule = schedule
        self._times = times
        self._workers = workers
        self._lanes = Counter(workers)
        self._events: list[Event] = []
        self._media = Media(self._events)
        self._network = Network(self._media, len(schedule)) if times.shares_media else None
        self._free_s: dict[Channel, float] = {}  # when a channel is free; without a network
        self._open: dict[tuple[int, int], int] = {}  # loads by key and target; with a network
        self._targets: dict[int, list[int]] = {}  # rows that receive a message, by its key
        self._takers: Counter[int] = Counter()  # number of rows in a sum, by its key
        self._gathering: dict[int, list[int]] = {}  # rows that have reached a sum, by its key
        steps = StageOps(times)
        self._steps = [[steps[action.op, action.stage] for action in row] for row in schedule]
        for row, (own, actions) in enumerate(zip(self._steps, schedule, strict=True)):
            for step, action in zip(own, actions, strict=True):
                if step.code == RECEIVE:
                    self._targets.setdefault(step.key(action.number), []).append(row)
                elif step.code == SUM:
                    self._takers[step.key(action.number)] += 1
        self._arrivals_s: list[dict[int, float]] = [{} for _ in schedule]  # by row and key
        self._awaited = [NOTHING] * len(schedule)  # the key of the message that a row waits for
        self._waits_at = [0] * len(schedule)  # the index of the action that waits
        self._sums = [0] * len(schedule)  # by row, the number of sums under way
        self._summed_s = [0.0] * len(schedule)  # when the row's last sum ended

    def run(self) -> None:
        """Process all events. Afterwards, rows that still wait are in `stuck`."""
        events, rows = self._events, len(self._schedule)
        resume = []
        for number in range(rows):
            row = self._row(number)
            next(row)
            resume.append(row.send)
            events.append((0.0, number, ALONE))
        while events:
            now_s, number, state = heappop(events)
            if state != ALONE and not self._media.ends(number, state, now_s):
                continue
            if number >= rows:
                self._leave(number, now_s)
                continue
            until_s = resume[number](now_s)
            if until_s is not None:
                heappush(events, (until_s, number, ALONE))

    @property
    def stuck(self) -> dict[int, Action]:
        """By row, the action that still waits: for a message that is never sent, or for a sum."""
        return {
            row: self._schedule[row][self._waits_at[row]]
            for row, awaited in enumerate(self._awaited)
            if awaited != NOTHING
        }

    def _row(self, row: int) -> RowWalk:
        """Run the actions of a row in order."""
        actions, arrivals_s, record = self._schedule[row], self._arrivals_s[row], self.spans.append
        is_lane = self._lanes[self._workers[row]] > 1
        network, first_s = self._network, None  # end of the previous pass's first chunk
        meets_others = is_lane or network is not None
        now_s = yield None
        for index, step in enumerate(self._steps[row]):
            action, code = actions[index], step.code
            if step.after_sums:
                now_s = yield from self._wait_for_sums(row, index, now_s)
            start_s = now_s
            if code == COMPUTE:
                work_s = step.compute_s
                if step.chunks > 1 and self._is_sent_next(row, index):
                    chunk_s = work_s / step.chunks
                    if chunk_s and meets_others:
                        now_s = yield self._until_s(row, chunk_s, now_s)
                        work_s, chunk_s = work_s - chunk_s, 0.0
                    first_s = now_s + chunk_s
                    if network is not None:
                        self._send_early(network, row, index + 1, now_s)
                now_s = yield self._until_s(row, work_s, now_s) if is_lane else now_s + work_s
                record((row, action, start_s, now_s))
            elif code == SEND:
                self._post(row, step, action, first_s, now_s)
                first_s = None
            elif code == RECEIVE:
                key = step.key(action.number)
                arrival_s = arrivals_s.get(key)
                if arrival_s is None:
                    self._awaited[row], self._waits_at[row] = key, index
                    now_s = yield None
                elif arrival_s > now_s:
                    now_s = yield arrival_s
                record((row, action, start_s, now_s))
            else:
                self._gather(row, step, action, now_s)
        yield None

    def _until_s(self, row: int, work_s: float, now_s: float) -> float | None:
        """Return when the row's device has done this work; None if other lanes decide that."""
        if self._lanes[self._workers[row]] == 1:
            return now_s + work_s
        self._media.begin(row, work_s, (self._workers[row],), now_s)
        return None

    # Results in chunks.

    def _is_sent_next(self, row: int, index: int) -> bool:
        """Whether the action after `index` sends the result of the action at `index`."""
        actions = self._schedule[row]
        if index + 1 == len(actions):
            return False
        sender, maker, step = actions[index + 1], actions[index], self._steps[row][index]
        same = sender.op is step.sent_by and sender.stage == maker.stage
        return same and sender.number == maker.number

    def _send_early(self, network: Network, row: int, index: int, now_s: float) -> None:
        """Put a message on its edges while its pass still computes."""
        step, action = self._steps[row][index], self._schedule[row][index]
        key, worker = step.key(action.number), self._workers[row]
        for target in self._targets.get(key, ()):
            if self._workers[target] != worker:
                load = self._load(row, target, step, action, key, is_open=True)
                self._open[key, target] = network.put(load, now_s)

    # Messages.

    def _post(
        self, row: int, step: StageOp, action: Action, first_s: float | None, now_s: float
    ) -> None:
        """Queue a message on its edges; a message within a worker is free."""
        key, worker = step.key(action.number), self._workers[row]
        for target in self._targets.get(key, ()):
            if self._workers[target] == worker:
                self._arrive(row, target, action, key, now_s, now_s)
            elif self._network is None:
                edge = worker, self._workers[target]
                latency_s, occupancy_s, _ = step.transfer or self._transfer(action)
                start_s = max(now_s if first_s is None else first_s, self._free_s.get(edge, 0.0))
                left_s = start_s + occupancy_s
                if first_s is not None:  # the last chunk cannot leave before now
                    left_s = max(left_s, now_s + occupancy_s / step.chunks)
                self._free_s[edge] = left_s
                self._arrive(row, target, action, key, start_s, left_s + latency_s)
            elif first_s is None:
                self._network.put(self._load(row, target, step, action, key), now_s)
            else:
                load = self._open.pop((key, target))
                least_s = (step.transfer or self._transfer(action)).occupancy_s / step.chunks
                self._network.close(load, least_s, now_s)

    def _load(
        self,
        row: int,
        target: int,
        step: StageOp,
        action: Action,
        key: int,
        is_open: bool = False,
    ) -> Load:
        edge = self._workers[row], self._workers[target]
        transfer = step.transfer or self._transfer(action)
        return Load(action, key, (row, target), transfer, (edge,), is_open=is_open)

    def _transfer(self, action: Action) -> Transfer:
        """Return the cost of a message between tied stages, which depends on its number."""
        assert action.message is not None
        return self._times.transfer(action.message)

    def _arrive(
        self, row: int, target: int, action: Action, key: int, start_s: float, end_s: float
    ) -> None:
        """Record that a message arrives at `end_s`, which may be in the future."""
        self.spans.append((row, action, start_s, end_s))
        self._arrivals_s[target][key] = end_s
        if self._awaited[target] == key:
            self._awaited[target] = NOTHING
            heappush(self._events, (end_s, target, ALONE))

    def _leave(self, number: int, now_s: float) -> None:
        """Record that a message or a sum has left its media."""
        assert self._network is not None
        load = self._network.leave(number, now_s)
        if load is None or load.start_s is None:
            return
        if load.action.op is Op.ALL_REDUCE:
            self._summed(load.rows, load.action, load.start_s, now_s)
        else:
            row, target = load.rows
            end_s = now_s + load.transfer.latency_s
            self._arrive(row, target, load.action, load.key, load.start_s, end_s)

    # Sums over replicas.

    def _gather(self, row: int, step: StageOp, action: Action, now_s: float) -> None:
        """Record that a row has reached a sum; the last row begins the sum."""
        self._sums[row] += 1
        key = step.key(action.number)
        rows = self._gathering.setdefault(key, [])
        rows.append(row)
        if len(rows) < self._takers[key]:
            return
        transfer = step.transfer or FREE
        workers = [*dict.fromkeys(self._workers[each] for each in rows)]
        if self._network is not None:
            load = Load(action, key, rows, transfer, workers, hold_s=transfer.latency_s)
            self._network.put(load, now_s)
            return
        start_s = max(now_s, *(self._free_s.get(worker, 0.0) for worker in workers))
        end_s = start_s + (transfer.latency_s + transfer.occupancy_s)
        self._free_s.update(dict.fromkeys(workers, end_s))
        self._summed(rows, action, start_s, end_s)

    def _summed(self, rows: Sequence[int], action: Action, start_s: float, end_s: float) -> None:
        """Record that a sum ends at `end_s`, which may be in the future."""
        for row in rows:
            self.spans.append((row, action, start_s, end_s))
            self._sums[row] -= 1
            self._summed_s[row] = max(self._summed_s[row], end_s)
            if self._awaited[row] == SUMS and not self._sums[row]:
                self._awaited[row] = NOTHING
                heappush(self._events, (self._summed_s[row], row, ALONE))

    def _wait_for_sums(
        self, row: int, index: int, now_s: float
    ) -> Generator[float | None, float, float]:
        """Wait for all sums that the row has begun. Returns the time afterwards."""
        if self._sums[row]:
            self._awaited[row], self._waits_at[row] = SUMS, index
            now_s = yield None
        elif self._summed_s[row] > now_s:
            now_s = yield self._summed_s[row]
        return now_s
