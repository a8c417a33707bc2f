"""Validator: checks a schedule before it runs. Most of its messages show the rows, with the faulty
action marked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import GRADIENTS, PEERS, TIED_OPS, Action, Message, Op, Schedule
from hetpipe.schedule.complete import WEIGHTS
from hetpipe.schedule.lanes import laned_stages, row_names, row_workers
from hetpipe.schedule.order import run_order
from hetpipe.schedule.requirements import (
    BACKWARDS,
    HALVES,
    Shape,
    applied_by,
    needed_by,
    required_of,
)
from hetpipe.schedule.tables import is_valid
from hetpipe.schedule.text import format_grid
from hetpipe.schedule.turns import places, round_of


def validate(
    schedule: Schedule,
    microbatches: int,
    in_flight: Sequence[int] | None = None,
    mini_batches: int = 1,
    replicas: Sequence[int] = (),
    flushes: bool = True,
) -> None:
    """Check that the schedule trains each micro-batch once, in order, and cannot deadlock.

    `microbatches` is the number in one mini-batch. `in_flight` has, for each stage, the most
    forwards that may wait for their backward. `replicas` has the number of replicas of each stage,
    if they take turns and each has its own row. Without flushes, the messages about tied parameters
    have numbers of mini-batches. Raises `ScheduleError`.
    """
    if mini_batches == 1 and not replicas and is_valid(schedule, microbatches, in_flight):
        return
    laned = laned_stages(schedule)
    rows = places(replicas)
    stages = _check_stages(schedule, laned, rows)
    halved = {action.stage for _, _, action in _cells(schedule) if action.op in HALVES}
    replicas = replicas or (1,) * stages
    one_by_one = bool(rows) and any(a.op in GRADIENTS for _, _, a in _cells(schedule))
    per_update = (1,) * stages if one_by_one else replicas
    peers = {} if flushes else _peers(schedule)
    shape = Shape(
        stages, halved, laned, microbatches, rows, replicas, per_update, one_by_one, peers
    )
    _check_complete(schedule, shape, mini_batches)
    _check_order(schedule, shape, in_flight)
    _check_edges(schedule, shape)
    _check_progress(schedule)
    if one_by_one:
        _check_gradients(schedule, shape)


def _fail(schedule: Schedule, why: str, worker: int, index: int) -> ScheduleError:
    return ScheduleError(f"{why}\n{format_grid(schedule, {worker: index})}")


def _cells(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    for worker, row in enumerate(schedule):
        for index, action in enumerate(row):
            yield worker, index, action


def _check_stages(schedule: Schedule, laned: set[int], rows: Sequence[tuple[int, int]]) -> int:
    """Return the number of stages. Raises `ScheduleError` for gaps in their numbers, and for a
    stage on two workers."""
    owner: dict[int, int] = {}
    for worker, index, action in _cells(schedule):
        if rows:
            if worker >= len(rows) or rows[worker][0] != action.stage:
                why = f"row {worker} is not of stage {action.stage}: give every replica a row"
                raise _fail(schedule, why, worker, index)
            owner[action.stage] = worker
        elif owner.setdefault(action.stage, worker) != worker and action.stage not in laned:
            why = f"stage {action.stage} is on workers {owner[action.stage]} and {worker}"
            raise _fail(schedule, f"{why}; give it to one of them", worker, index)
    if sorted(owner) != list(range(len(owner))):
        raise ScheduleError(f"stages are {sorted(owner)}; number them from 0 without gaps")
    return len(owner)


def _peers(schedule: Schedule) -> dict[int, set[tuple[Op, int]]]:
    """Return, by stage, the operations for tied parameters, each with the stage at the other
    end."""
    peers: dict[int, set[tuple[Op, int]]] = defaultdict(set)
    for _, _, action in _cells(schedule):
        if action.op in TIED_OPS:
            peers[action.stage].add((action.op, action.number % PEERS))
    return peers


def _check_complete(schedule: Schedule, shape: Shape, mini_batches: int) -> None:
    """Check that each stage has exactly the actions that its place in the pipeline requires."""
    at = {action.stage: worker for worker, _, action in _cells(schedule)}
    everything = range(mini_batches)
    Due = list[tuple[int, Sequence[int], Sequence[int]]]  # stage, mini-batches, updates
    groups: list[tuple[set[int], Due]] = []
    if not shape.places:
        groups = [(set(range(len(schedule))), [(n, everything, everything) for n in at])]
    else:
        for worker, (n, replica) in enumerate(shape.places):
            own = everything[replica :: shape.replicas[n]]
            ends = {round_of(b, shape.per_update[n], mini_batches)[-1] for b in everything}
            groups.append(({worker}, [(n, own, sorted(ends))]))
    optional = {op for op in Op if op.value[-1] in "GLPV"}
    optional |= set() if shape.one_by_one else {Op.ALL_REDUCE}
    for workers, due in groups:
        required = {
            action
            for stage, own, updates in due
            for action in required_of(stage, shape, own, updates)
        }
        seen: set[Action] = set()
        for worker, index, action in _cells(schedule):
            if worker not in workers:
                continue
            if action in seen:
                raise _fail(schedule, f"{action} occurs twice", worker, index)
            if action not in required and action.op not in optional:
                why = (
                    f"{action} has no place among {shape.stages} stages, "
                    f"{shape.microbatches * mini_batches} micro-batches"
                )
                raise _fail(schedule, why, worker, index)
            if action.op in TIED_OPS and (peer := action.number % PEERS) >= shape.stages:
                why = f"{action} names stage {peer}, and there are {shape.stages} stages"
                raise _fail(schedule, why, worker, index)
            seen.add(action)
        for action in sorted(required - seen):
            worker = min(workers) if shape.places else at[action.stage]
            raise _fail(schedule, f"{action} is missing", worker, len(schedule[worker]))


def _check_order(schedule: Schedule, shape: Shape, in_flight: Sequence[int] | None) -> None:
    """Check each stage's order of actions, and its bound of micro-batches in flight.

    Inputs come before passes, and passes before outputs. Updates come in ascending order, each
    after the backwards whose gradients it applies.
    """
    for row_number, row in enumerate(schedule):
        done: set[Action] = set()
        losses = [action for action in row if action.op is Op.LOSS]
        waiting: Counter[int] = Counter()
        updated: Counter[int] = Counter()  # by stage, the number of mini-batches applied so far
        for index, action in enumerate(row):
            n = action.stage
            if action.op is Op.UPDATE:
                first = action.number - action.number % shape.per_update[n]
                if updated[n] < first:
                    why = f"{action} comes before the update of mini-batch {updated[n]}"
                    raise _fail(schedule, f"{why}; put updates in order", row_number, index)
                late = updated[n] != first or not done.issuperset(
                    applied_by(action, shape, row_number)
                )
                updated[n] = action.number + 1
            else:
                kind = action.op.value[-1]
                per_number = {"A": 1, "G": PEERS}.get(kind, shape.microbatches)
                mini_batch = action.number // per_number
                late = kind != "P" and mini_batch < updated[n]
            if late:
                why = f"the update of stage {n} must come last, except for tied parameters"
                raise _fail(schedule, why, row_number, index)
            needs = [a for a in needed_by(action, shape, row, losses) if a not in done]
            if needs:
                why = f"{action} comes before {needs[0]}, which it needs"
                raise _fail(schedule, why, row_number, index)
            done.add(action)
            waiting[n] += action.op is Op.FORWARD
            ends = (Op.RECV_VACANT,) if n in shape.laned else WEIGHTS
            waiting[n] -= action.op in ends
            if in_flight is not None and waiting[n] > in_flight[n]:
                why = f"stage {n} has {waiting[n]} forwards in flight, its bound is {in_flight[n]}"
                raise _fail(schedule, why, row_number, index)


def _check_gradients(schedule: Schedule, shape: Shape) -> None:
    """Check that a replica's accumulators serve one mini-batch at a time.

    The accumulators hold the gradients of the replica's own mini-batch from the first backward
    until the send, and received gradients until their update. Sent gradients are kept aside until
    their update; before that update, no backward of another mini-batch may come.
    """
    for row_number, row in enumerate(schedule):
        held: int | None = None  # the mini-batch whose gradients are in the accumulators
        aside: int | None = None  # the mini-batch whose gradients are kept aside
        for index, action in enumerate(row):
            mini_batch, before = action.number, held
            if action.op in BACKWARDS:
                mini_batch //= shape.microbatches
                before = held if aside is None else aside
                held = mini_batch
            elif action.op is Op.SEND_GRAD:
                held, aside = None, mini_batch
                continue
            elif action.op is Op.RECV_GRAD:
                held = mini_batch
            elif action.op is Op.UPDATE:
                held = None
                aside = None if aside == mini_batch else aside
            else:
                continue
            if before not in (None, mini_batch):
                why = f"{action} comes before the gradients of mini-batch {before} are applied"
                raise _fail(schedule, why, row_number, index)


Edge = tuple[int, int, str, int, int]
"""Source stage, target stage, kind of message (empty between different stages), source replica,
target replica."""


def _edges(action: Action, message: Message, shape: Shape, row: int) -> list[Edge]:
    """Return the edges that carry a message."""
    ends = message.source, message.target
    kind = message.kind if ends[0] == ends[1] else ""
    if action.op in GRADIENTS:
        owner = shape.owner(ends[0], message.number)
        peers = range(shape.replicas[ends[0]])
        if action.op is Op.RECV_GRAD:
            peers = range(shape.places[row][1], shape.places[row][1] + 1)
        return [(*ends, kind, owner, peer) for peer in peers if peer != owner]
    mini_batch = message.number // (1 if action.op in TIED_OPS else shape.microbatches)
    return [(*ends, kind, shape.owner(ends[0], mini_batch), shape.owner(ends[1], mini_batch))]


def _check_edges(schedule: Schedule, shape: Shape) -> None:
    """Check that the receives on each edge come in the order of its sends. Messages have no names,
    so only their order identifies them."""
    sends: dict[Edge, list[Message]] = defaultdict(list)
    for worker, _, action in _cells(schedule):
        if action.op.is_send and action.message:
            for edge in _edges(action, action.message, shape, worker):
                sends[edge].append(action.message)
    received: Counter[Edge] = Counter()
    for worker, index, action in _cells(schedule):
        message = action.message
        if message is None:
            continue
        if action.op.is_send:
            continue
        (edge,) = _edges(action, message, shape, worker)
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
    """Raise `ScheduleError` for a deadlock, in which `run_order` cannot reach all actions."""
    done = Counter(row for rows, _ in run_order(schedule) for row in rows)
    stuck = {worker: done[worker] for worker, row in enumerate(schedule) if done[worker] < len(row)}
    if stuck:
        raise ScheduleError(f"deadlock: {_cycle(schedule, stuck)}\n{format_grid(schedule, stuck)}")


def _cycle(schedule: Schedule, stuck: dict[int, int]) -> str:
    """Describe the cycle of a deadlock: go from a stuck worker to the worker for which it waits,
    until a worker repeats."""
    sender = {a.message: worker for worker, _, a in _cells(schedule) if a.op.is_send}
    names = row_names(row_workers(schedule))
    trail: list[int] = []
    worker = next(iter(stuck))
    while worker not in trail:
        trail.append(worker)
        action = schedule[worker][stuck[worker]]
        if action.message is None:  # the sum waits for a worker that has not reached it
            absent = (w for w, row in enumerate(schedule) if action in row and w in stuck)
            worker = next(w for w in absent if schedule[w][stuck[w]] != action)
        else:
            worker = sender[action.message]
    cycle = trail[trail.index(worker) :]
    waits = [
        f"{names[w]} waits in {schedule[w][stuck[w]]} for {names[v]}"
        for w, v in zip(cycle, cycle[1:] + cycle[:1], strict=True)
    ]
    return ", ".join(waits)
