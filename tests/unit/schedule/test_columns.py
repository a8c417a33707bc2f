"""Schedules in columns, compared with their rows and with definitions of the rules."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule import generate
from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.columns import Columns, Turns, columns_of, in_turns
from hetpipe.schedule.rule import rule_of

F, B, I, W = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT  # noqa: E741
SHAPES = [(1, 1), (1, 4), (2, 1), (3, 2), (3, 8), (4, 4), (6, 13)]


def rows_of(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    return tuple(map(tuple, schedule))


def straight(stage: int, depth: int, microbatches: int) -> Iterator[Action]:
    """Yield `depth` forwards, then one backward, one forward, ..."""
    depth = min(depth, microbatches)
    yield from (Action(stage, F, number) for number in range(depth))
    for number in range(microbatches):
        yield Action(stage, B, number)
        if number + depth < microbatches:
            yield Action(stage, F, number + depth)


def late_weights(stage: int, stages: int, microbatches: int, bound: int) -> Iterator[Action]:
    """Yield 1F1B with the weight halves of backwards as late as the bound allows."""
    depth = min(stages - stage, microbatches, bound)
    late = min(stage, microbatches, bound - depth)
    yield from (Action(stage, F, number) for number in range(depth))
    for number in range(microbatches):
        yield Action(stage, I, number)
        if number >= late:
            yield Action(stage, W, number - late)
        if number + depth < microbatches:
            yield Action(stage, F, number + depth)
    yield from (Action(stage, W, number) for number in range(microbatches - late, microbatches))


def in_chunks(worker: int, workers: int, stages: int, microbatches: int) -> Iterator[Action]:
    """Yield Megatron's order: rounds through all chunks, each with one micro-batch per worker."""
    chunks = range(worker, stages, workers)
    rounds = [range(first, first + workers) for first in range(0, microbatches, workers)]
    forwards = [Action(n, F, m) for turn in rounds for n in chunks for m in turn]
    backwards = [Action(n, B, m) for turn in rounds for n in reversed(chunks) for m in turn]
    warm_up = min(2 * (workers - worker - 1) + stages - workers, len(forwards))
    yield from forwards[:warm_up]
    steady = len(forwards) - warm_up
    for pair in zip(forwards[warm_up:], backwards[:steady], strict=True):
        yield from pair
    yield from backwards[steady:]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "1f1b-so"])
def test_straight_rules_match_their_definition(name: str, stages: int, microbatches: int) -> None:
    depths = {
        "naive": [1] * stages,
        "gpipe": [microbatches] * stages,
        "1f1b": [stages - n for n in range(stages)],
        "1f1b-so": [2 * (stages - n) for n in range(stages)],
    }[name]
    expected = tuple(tuple(straight(n, depths[n], microbatches)) for n in range(stages))
    assert rows_of(rule_of(name).rows(stages, microbatches)) == expected


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
@pytest.mark.parametrize("more", [0, 1, 5])
def test_late_weights_match_their_definition(stages: int, microbatches: int, more: int) -> None:
    bounds = [stages - n + more for n in range(stages)]
    expected = tuple(tuple(late_weights(n, stages, microbatches, bounds[n])) for n in range(stages))
    assert rows_of(rule_of("zb-h1").rows(stages, microbatches, bounds)) == expected


@pytest.mark.parametrize(("workers", "chunks", "rounds"), [(1, 1, 3), (2, 2, 1), (3, 2, 4)])
def test_chunks_match_their_definition(workers: int, chunks: int, rounds: int) -> None:
    stages, microbatches = workers * chunks, workers * rounds
    expected = tuple(
        tuple(in_chunks(worker, workers, stages, microbatches)) for worker in range(workers)
    )
    rows = rule_of("interleaved").rows(stages, microbatches, None, workers)
    assert rows_of(rows) == expected


def test_operations_in_turns_are_merged_in_their_order() -> None:
    numbers = np.arange(3)
    parts = [
        Turns(F, np.array([[-1], [0]]), np.array([[0], [1]]), numbers),
        Turns(B, np.array([[0], [0]]), np.array([[0], [1]]), numbers),
    ]
    assert str(rows_of(in_turns(parts, 3))) == str(
        (
            tuple(map(Action.parse, ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2"))),
            tuple(map(Action.parse, ("1F0", "1B0", "1F1", "1B1", "1F2", "1B2"))),
        )
    )


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "fbp", "interleaved"])
def test_columns_equal_their_rows(name: str) -> None:
    schedule = generate(name, 4, 4, workers=2 if name in ("zb-v", "interleaved") else None)
    rows = rows_of(schedule)
    columns = columns_of(rows)
    assert columns == schedule == rows
    assert rows_of(columns) == rows
    assert (columns[0], columns[1:]) == (rows[0], rows[1:])
    assert (len(columns), hash(columns), repr(columns)) == (len(rows), hash(rows), repr(rows))
    assert columns.lengths.tolist() == [len(row) for row in rows]
    assert columns != columns_of(rows[:-1])
    assert columns != rows[:-1]


def test_pickled_columns_become_rows() -> None:
    """Workers get rows, which need no arrays."""
    schedule = generate("1f1b", 3, 4)
    assert pickle.loads(pickle.dumps(schedule)) == rows_of(schedule)


def test_an_order_does_every_action_once_and_after_its_message() -> None:
    schedule = columns_of(generate("1f1b", 4, 6))
    order = schedule.order
    assert order is not None
    assert Counter(order.step_of.tolist()).keys() == set(range(len(order.rows)))
    assert sorted(order.places.tolist()) == list(range(len(order.rows)))
    assert all(sender <= place for place, sender in enumerate(order.awaited))


def test_a_deadlock_has_no_order() -> None:
    rows = [[Action.parse(text) for text in row.split()] for row in ("0RB0 0SF0", "1RF0 1SB0")]
    assert columns_of(tuple(map(tuple, rows))).order is None


def test_numbers_beyond_32_bits_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"beyond 2147483647; number stages"):
        columns_of(((Action(0, F, 1 << 40),),))


def test_empty_rows_are_kept() -> None:
    schedule = ((), (Action(0, F, 0),), ())
    assert rows_of(columns_of(schedule)) == schedule
    assert isinstance(columns_of(schedule), Columns)
