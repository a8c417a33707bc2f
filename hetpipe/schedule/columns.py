"""Columns: a schedule as arrays."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, overload

import numpy as np

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.codes import CODES, OPS, Array
from hetpipe.schedule.order import Order, order_steps

Row = tuple[Action, ...]
Item = TypeVar("Item")


class LazySequence(Sequence[Item]):
    """A sequence whose items are made when they are first used."""

    @property
    @abstractmethod
    def items(self) -> tuple[Item, ...]:
        """All items."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        return self.items[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)

    def __eq__(self, other: object) -> bool:
        return self.items == (other.items if isinstance(other, LazySequence) else other)

    def __hash__(self) -> int:
        return hash(self.items)

    def __repr__(self) -> str:
        return repr(self.items)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.items,)


class Columns(LazySequence[Row]):
    """A schedule: rows of actions, stored as three columns.

    `table[0]` has the codes of the operations, `table[1]` the stages and `table[2]` the numbers of
    all actions, row after row. `lengths` has the number of actions in each row.
    """

    def __init__(self, table: Array, lengths: Array) -> None:
        self.table = table.astype(np.int32, copy=False)
        self.lengths = lengths
        self.codes, self.stages, self.numbers = self.table

    @cached_property
    def ends(self) -> Array:
        """For each row, the index after its last action."""
        return np.cumsum(self.lengths)

    @cached_property
    def rows(self) -> Array:
        """The row of each action."""
        return np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)

    @cached_property
    def order(self) -> Order | None:
        """The order of all steps, or None; see `hetpipe.schedule.order.order_steps`."""
        return order_steps(self.codes, self.stages, self.numbers, self.rows)

    @cached_property
    def items(self) -> tuple[Row, ...]:
        """The rows, as tuples of `Action` objects."""
        ops = map(OPS.__getitem__, self.codes.tolist())
        cells = [*map(Action, self.stages.tolist(), ops, self.numbers.tolist())]
        return tuple(tuple(cells[lo:hi]) for lo, hi in pairwise([0, *self.ends.tolist()]))

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Columns):
            mine, theirs = (self.lengths, self.table), (other.lengths, other.table)
            return all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
        return super().__eq__(other)

    __hash__ = LazySequence.__hash__


def columns_of(schedule: Schedule) -> Columns:
    """Return the schedule as columns. Raises `ScheduleError` for numbers beyond 32 bits."""
    if isinstance(schedule, Columns):
        return schedule
    cells = [*chain.from_iterable(schedule)]
    columns = (
        map(CODES.__getitem__, map(attrgetter("op"), cells)),
        map(attrgetter("stage"), cells),
        map(attrgetter("number"), cells),
    )
    try:
        table = [np.fromiter(column, np.int32, len(cells)) for column in columns]
    except OverflowError as error:
        most = max(cells, key=lambda action: max(abs(action.stage), abs(action.number)))
        raise ScheduleError(
            f"{most}: the stage or the number is beyond {np.iinfo(np.int32).max}; number stages "
            "and micro-batches from 0"
        ) from error
    return Columns(np.array(table), np.array([len(row) for row in schedule], int))


class Turns(NamedTuple):
    """An operation that every row runs once per turn, from the row's first turn on."""

    op: Op
    first: Array  # by row, the turn in which the operation first runs; shape (rows, 1)
    stages: Array  # by row and turn; shape (rows, count), or a shape that broadcasts to it
    numbers: Array  # by row and turn, as `stages`


def in_turns(parts: Sequence[Turns], count: int) -> Columns:
    """Return rows that run each operation `count` times, in every turn in the order of `parts`. A
    row skips an operation before its first turn and after its last turn."""
    times, rows = np.arange(count), len(parts[0].first)
    table = np.empty((3, rows * len(parts) * count), np.int32)
    begins = np.arange(rows)[:, None] * (len(parts) * count)
    for place, part in enumerate(parts):
        at = begins + times
        for before, other in enumerate(parts):
            if other is not part:
                turns = part.first - other.first + (before < place)
                at += np.clip(times + turns, 0, count)
        table[0, at], table[1, at], table[2, at] = CODES[part.op], part.stages, part.numbers
    return Columns(table, np.full(rows, len(parts) * count))
