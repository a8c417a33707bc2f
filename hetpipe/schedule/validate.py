"""Validator: a schedule is checked before anything runs it, without a device.

Every check raises `ScheduleError` with the grid and the faulty cell marked.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Message, Op, Schedule
from hetpipe.schedule.grid import format_grid
from hetpipe.schedule.lanes import laned_stages, row_names

HALVES = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


class Shape(NamedTuple):
    """What is asked of a stage depends on these."""

    stages: int
    halved: set[int]  # stages with backwards in halves
    laned: set[int]  # stages with forwards and backwards on two lanes


def validate(
    schedule: Schedule,
    microbatches: int,
    in_flight: Sequence[int] | None = None,
    mini_batches: int = 1,
) -> None:
    """Check that the schedule trains each micro-batch once, in order, and cannot deadlock.

    `microbatches` in each of `mini_batches`; `in_flight`: the most forwards that may wait for their
    backward, per stage. Raises `ScheduleError`.
    """
    laned = laned_stages(schedule)
    stages = _check_stages(schedule, laned)
    halved = {action.stage for _, _, action in _cells(schedule) if action.op in HALVES}
    shape = Shape(stages, halved, laned)
    _check_complete(schedule, shape, microbatches, mini_batches)
    _check_order(schedule, shape, microbatches, in_flight)
    _check_edges(schedule)
    _check_progress(schedule)


def _fail(schedule: Schedule, why: str, worker: int, index: int) -> ScheduleError:
    return ScheduleError(f"{why}\n{format_grid(schedule, {worker: index})}")


def _cells(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for worker, row in enumerate(schedule):
        for index, action in enumerate(row):
            yield worker, index, action


def _check_stages(schedule: Schedule, laned: set[int]) -> int:
    """How many there are."""
    owner: dict[int, int] = {}
    for worker, index, action in _cells(schedule):
        if owner.setdefault(action.stage, worker) != worker and action.stage not in laned:
            why = f"stage {action.stage} is on workers {owner[action.stage]} and {worker}"
            raise _fail(schedule, f"{why}; give it to one", worker, index)
    if sorted(owner) != list(range(len(owner))):
        raise ScheduleError(f"stages are {sorted(owner)}; number them from 0 without gaps")
    return len(owner)


def _check_complete(schedule: Schedule, shape: Shape, microbatches: int, mini_batches: int) -> None:
    """Each stage has exactly the actions that its place in the pipeline asks for."""
    places = {action.stage: worker for worker, _, action in _cells(schedule)}
    numbers = (range(microbatches * mini_batches), range(mini_batches))
    required = {action for stage in places for action in _required(stage, shape, *numbers)}
    seen: set[Action] = set()
    for worker, index, action in _cells(schedule):
        if action in seen:
            raise _fail(schedule, f"{action} is there twice", worker, index)
        if action not in required and action.op.value[-1] not in "GPVA":
            why = (
                f"{action} has no place among {shape.stages} stages, "
                f"{microbatches * mini_batches} micro-batches"
            )
            raise _fail(schedule, why, worker, index)
        seen.add(action)
    for action in sorted(required - seen):
        worker = places[action.stage]
        raise _fail(schedule, f"{action} is missing", worker, len(schedule[worker]))


def _required(
    stage: int, shape: Shape, microbatches: range, mini_batches: range
) -> Iterator[Action]:
    ops = [Op.FORWARD, *(HALVES if stage in shape.halved else (Op.BACKWARD,))]
    if stage in shape.laned:
        ops += [Op.SEND_KEPT, Op.RECV_KEPT]
    if stage > 0:
        ops += [Op.RECV_FORWARD, Op.SEND_BACKWARD]
    if stage < shape.stages - 1:
        ops += [Op.SEND_FORWARD, Op.RECV_BACKWARD]
    yield from (Action(stage, op, number) for op in ops for number in microbatches)
    yield from (Action(stage, Op.UPDATE, number) for number in mini_batches)


def _check_order(
    schedule: Schedule, shape: Shape, microbatches: int, in_flight: Sequence[int] | None
) -> None:
    """Inside a stage: inputs before passes before outputs, updates behind what they apply and in
    order, and the memory bound kept."""
    for row_number, row in enumerate(schedule):
        done: set[Action] = set()
        waiting: Counter[int] = Counter()
        for index, action in enumerate(row):
            n = action.stage
            if action.op is Op.UPDATE:
                last = Op.BACKWARD_WEIGHT if n in shape.halved else Op.BACKWARD
                first = action.number * microbatches
                applied = [Action(n, last, first + i) for i in range(microbatches)]
                before = [Action(n, Op.UPDATE, action.number - 1)] if action.number else []
                late = not done.issuperset(applied + before)
            else:
                kind = action.op.value[-1]
                each = 1 if kind == "A" else microbatches
                mini_batch = 0 if kind == "G" else action.number // each
                late = kind != "P" and Action(n, Op.UPDATE, mini_batch) in done
            if late:
                why = f"the update of stage {n} must come last, but for tied parameters"
                raise _fail(schedule, why, row_number, index)
            needs = [a for a in _needs(action, shape, row) if a not in done]
            if needs:
                why = f"{action} comes before {needs[0]}, which it needs"
                raise _fail(schedule, why, row_number, index)
            done.add(action)
            waiting[n] += action.op is Op.FORWARD
            ends = (Op.RECV_VACANT,) if n in shape.laned else (Op.BACKWARD, Op.BACKWARD_WEIGHT)
            waiting[n] -= action.op in ends
            if in_flight is not None and waiting[n] > in_flight[n]:
                why = f"stage {n} has {waiting[n]} forwards in flight, its bound is {in_flight[n]}"
                raise _fail(schedule, why, row_number, index)


def _needs(action: Action, shape: Shape, row: Sequence[Action]) -> Iterator[Action]:
    """What the same stage must have done before, on the same row."""
    n, op, number = action.stage, action.op, action.number
    halved = n in shape.halved
    if op is Op.FORWARD and n > 0:
        yield Action(n, Op.RECV_FORWARD, number)
    elif op in (Op.SEND_FORWARD, Op.SEND_KEPT):
        yield Action(n, Op.FORWARD, number)
    elif op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        yield Action(n, Op.RECV_KEPT if n in shape.laned else Op.FORWARD, number)
        if n < shape.stages - 1:
            yield Action(n, Op.RECV_BACKWARD, number)
    elif op is Op.BACKWARD_WEIGHT:
        yield Action(n, Op.BACKWARD_INPUT, number)
    elif op is Op.SEND_BACKWARD:
        yield Action(n, Op.BACKWARD_INPUT if halved else Op.BACKWARD, number)
    elif op is Op.SEND_VACANT:
        yield Action(n, Op.BACKWARD_WEIGHT if halved else Op.BACKWARD, number)
    elif op in (Op.ALL_REDUCE, Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD):  # last: one order of sums
        weights = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
        yield from (a for a in row if a.stage == n and a.op in weights)
    elif op is Op.UPDATE:
        summing = (Op.ALL_REDUCE, Op.SEND_TIED_GRAD, Op.RECV_TIED_GRAD)
        yield from (a for a in row if a.stage == n and a.op in summing)
    elif op in (Op.SEND_TIED_PARAM, Op.RECV_TIED_PARAM):
        yield Action(n, Op.UPDATE)


Edge = tuple[int, int, str]  # source and target stage; between lanes, of one kind of message


def _edge(message: Message) -> Edge:
    return (*message[:2], message.kind if message.source == message.target else "")


def _check_edges(schedule: Schedule) -> None:
    """On each edge receives are in the order of the sends: messages carry no address."""
    sends: dict[Edge, list[Message]] = defaultdict(list)
    for _, _, action in _cells(schedule):
        if action.op.is_send and action.message:
            sends[_edge(action.message)].append(action.message)
    places: dict[Edge, tuple[int, int]] = {}
    received: Counter[Edge] = Counter()
    for worker, index, action in _cells(schedule):
        message = action.message
        if message is None:
            continue
        edge = _edge(message)
        if action.op.is_send:
            places.setdefault(edge, (worker, index))
            continue
        turn = received[edge]
        received[edge] += 1
        sent = sends[edge][turn] if turn < len(sends[edge]) else None
        if sent != message:
            instead = "nothing more" if sent is None else f"{sent.kind}{sent.number} at that turn"
            why = f"{action} receives from stage {edge[0]}, which sends {instead}"
            raise _fail(schedule, why, worker, index)
    for edge, messages in sends.items():
        if received[edge] < len(messages):
            lost = messages[received[edge]]
            for worker, index, action in _cells(schedule):
                if action.op.is_send and action.message == lost:
                    raise _fail(schedule, f"{action} is never received", worker, index)


def _check_progress(schedule: Schedule) -> None:
    """Run it without a clock: sends are buffered, a receive waits for its send."""
    position = [0] * len(schedule)
    sent: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for worker, row in enumerate(schedule):
            while position[worker] < len(row):
                action = row[position[worker]]
                message = action.message
                if action.op.is_receive and message not in sent:
                    break
                if action.op.is_send and message is not None:
                    sent.add(message)
                position[worker] += 1
                moved = True
    stuck = {w: p for w, p in enumerate(position) if p < len(schedule[w])}
    if stuck:
        raise ScheduleError(f"deadlock: {_cycle(schedule, stuck)}\n{format_grid(schedule, stuck)}")


def _cycle(schedule: Schedule, stuck: dict[int, int]) -> str:
    """Who waits for whom, as text: follow the waits from one stuck worker until one repeats."""
    sender = {a.message: worker for worker, _, a in _cells(schedule) if a.op.is_send}
    names = row_names(schedule)
    trail: list[int] = []
    worker = next(iter(stuck))
    while worker not in trail:
        trail.append(worker)
        message = schedule[worker][stuck[worker]].message
        assert message is not None  # only receives block
        worker = sender[message]
    cycle = trail[trail.index(worker) :]
    waits = [
        f"{names[w]} waits in {schedule[w][stuck[w]]} for {names[v]}"
        for w, v in zip(cycle, cycle[1:] + cycle[:1], strict=True)
    ]
    return ", ".join(waits)
