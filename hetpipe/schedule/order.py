"""Order: sorts the steps of a plain schedule, each after all steps for which it waits.

`run_order` sorts the actions of any schedule. A schedule is plain if every stage is on one row, and
replicas neither sum gradients nor send them to each other. Then the order of each worker and each
edge does not depend on any time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hetpipe.schedule.action import PEERS, Action, Message, Op, Schedule
from hetpipe.schedule.codes import (
    COMPUTE,
    IS_TIED,
    KINDS,
    OPS,
    OTHER,
    RECEIVE,
    ROLES,
    SEND,
    SENDERS,
    WAYS,
    Array,
)


def run_order(schedule: Schedule) -> Iterator[tuple[tuple[int, ...], Action]]:
    """Yield each action with its rows, in an order in which the actions can run.

    A send never waits, a receive waits for its send, and a sum waits until all its rows have
    reached the sum. Actions that never run because of a deadlock are omitted.
    """
    position = [0] * len(schedule)
    sent: set[Message | None] = set()
    takers = Counter(a for row in schedule for a in row if a.op is Op.ALL_REDUCE)
    reached: dict[Action, list[int]] = defaultdict(list)
    moved = True
    while moved:
        moved = False
        for number, row in enumerate(schedule):
            while position[number] < len(row):
                action, rows = row[position[number]], [number]
                if action.op.is_receive and action.message not in sent:
                    break
                if action.op is Op.ALL_REDUCE:
                    rows = reached[action]
                    if number not in rows:
                        rows.append(number)
                    if len(rows) < takers[action]:
                        break
                if action.op.is_send:
                    sent.add(action.message)
                for each in rows:
                    position[each] += 1
                moved = True
                yield tuple(rows), action


@dataclass(frozen=True, eq=False)
class Order:
    """The steps of a schedule. In one step a worker receives, computes and sends, or does only some
    of the three.

    Actions with the same operation and stage cost the same, so `passes` and `messages` have one
    entry for all of them. A way leads from row to row over an edge. The first `row_count` ways lead
    from each row to itself, for steps that send nothing or send within the row. Then comes one way
    for each of `messages`.
    """

    rows: list[int]
    awaited: list[int]  # 1 + the step that sends the received message; 0: receives nothing
    computed: list[int]  # 1 + an index of `passes`; 0: computes nothing
    ways: list[int]
    streams: list[bool]  # whether the step sends its result to another row
    passes: list[Action]
    messages: list[Message]
    edges: list[int]  # edge of each way
    row_count: int
    places: Array  # number of each step when steps are counted row by row through the schedule
    step_of: Array  # for each action, row by row: the number of its step, counted row by row
    roles: Array  # role of each action, as in `hetpipe.schedule.codes`


class _Transfers(NamedTuple):
    """Sends, or receives, in the order of their messages."""

    at: Array  # places in the schedule
    peers: Array  # stages at the other end
    messages: Array  # integers; a send and its receive have the same integer
    ways: Array  # integers; messages of one kind between the same two stages have the same integer


def order_steps(codes: Array, stages: Array, numbers: Array, rows: Array) -> Order | None:
    """Return the order of a schedule in columns; None if the schedule is not plain, or
    deadlocks."""
    roles = ROLES[codes]
    if not len(codes) or min(stages.min(), numbers.min()) < 0 or roles.max() == OTHER:
        return None
    if stages.max() >= len(stages):
        return None
    row_of = np.zeros(1 + stages.max(), np.int32)
    row_of[stages] = rows
    if (row_of[stages] != rows).any():
        return None
    sends, receives = (_transfers(codes, stages, numbers, role) for role in (SEND, RECEIVE))
    if not np.array_equal(sends.messages, receives.messages):
        return None
    begins = np.append(True, (roles[1:] <= roles[:-1]) | (rows[1:] != rows[:-1]))
    step_of, row = np.cumsum(begins, dtype=np.int32) - 1, rows[begins]
    awaited, computed = np.zeros((2, len(row)), np.int32)
    awaited[step_of[receives.at]] = 1 + step_of[sends.at]
    places = np.array(_in_order(awaited.tolist(), np.flatnonzero(_changes(row)).tolist()))
    if len(places) < len(row) or not _changes(sends.messages).all():
        return None

    computes = np.flatnonzero(roles == COMPUTE)
    ones, kind_of = _distinct(codes[computes] * len(row_of) + stages[computes])
    computed[step_of[computes]] = 1 + kind_of
    passes = _actions(codes, stages, numbers, computes[ones])

    begins = _changes(sends.ways)
    own = sends.at[begins]
    here, there, row_count = rows[own], row_of[sends.peers[begins]], 1 + int(row[-1])
    edges = np.unique(here * np.int64(row_count) + there, return_inverse=True)[1]
    way_of = np.where(here == there, here, row_count + np.arange(len(own)))
    ways = row.copy()
    ways[step_of[sends.at]] = way_of[np.cumsum(begins) - 1]
    streams = np.zeros(len(row), bool)
    nexts = computes[computes + 1 < len(codes)] + 1
    makers = nexts - 1
    sends_it = (SENDERS[codes[makers]] == codes[nexts]) & (step_of[makers] == step_of[nexts])
    sends_it &= (stages[makers] == stages[nexts]) & (numbers[makers] == numbers[nexts])
    streams[step_of[makers]] = sends_it & (ways[step_of[makers]] >= row_count)
    sent = (action.message for action in _actions(codes, stages, numbers, own))
    messages = [message for message in sent if message is not None]

    index_of = np.zeros(1 + len(row), np.int32)
    index_of[1 + places] = 1 + np.arange(len(row))
    return Order(
        row[places].tolist(), index_of[awaited[places]].tolist(), computed[places].tolist(),
        ways[places].tolist(), streams[places].tolist(), passes, messages,
        [*range(row_count), *(row_count + edges).tolist()], row_count, places, step_of, roles,
    )  # fmt: skip


def _transfers(codes: Array, stages: Array, numbers: Array, role: int) -> _Transfers:
    """Return all sends or receives of a schedule."""
    at = np.flatnonzero(ROLES[codes] == role)
    own, here, number = codes[at], stages[at], numbers[at]
    mini_batches, others = np.divmod(number, PEERS)
    tied = IS_TIED[own]
    peers = np.where(tied, others, here + WAYS[own])
    source, target = (here, peers) if role == SEND else (peers, here)
    size = 2 + stages.max()
    ways = (KINDS[own] * np.int64(size) + source) * size + target
    messages = ways * (1 + numbers.max()) + np.where(tied, mini_batches, number)
    order = np.argsort(messages)
    return _Transfers(at[order], peers[order], messages[order], ways[order])


def _changes(values: Array) -> Array:
    """Return whether each value differs from the value before it."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def _distinct(values: Array) -> tuple[Array, Array]:
    """Return the last index of each distinct value, and for each value its number among the
    distinct values."""
    ones = np.full(1 + values.max(initial=-1), -1)
    ones[values] = np.arange(len(values))
    present = ones >= 0
    return ones[present], (np.cumsum(present) - 1)[values]


def _actions(codes: Array, stages: Array, numbers: Array, at: Array) -> list[Action]:
    """Return the actions at these places."""
    columns = stages[at].tolist(), codes[at].tolist(), numbers[at].tolist()
    return [Action(stage, OPS[code], number) for stage, code, number in zip(*columns, strict=True)]


def _in_order(awaited: list[int], begins: list[int]) -> list[int]:
    """Return all steps that can run, each after its awaited step and the previous step of its row.
    `begins` has the first step of each row."""
    order: list[int] = []
    done = bytearray(1 + len(awaited))  # whether a step is in `order`; index: 1 + step
    done[0] = True
    ready = list(pairwise([*begins, len(awaited)]))[::-1]  # remaining parts of rows
    waiting: list[tuple[int, int] | None] = [None] * len(done)  # part waiting for a step
    while ready:
        step, end = ready.pop()
        while step < end and done[awaited[step]]:
            order.append(step)
            step += 1
            done[step] = True
            if (rest := waiting[step]) is not None:
                ready.append(rest)
        if step < end:
            waiting[awaited[step]] = step, end
    return order
