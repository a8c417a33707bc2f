"""Schedules as text, one line per row.

    worker 0: 0F0 0SF0 0RB0 0B0 0U  # two stages, one micro-batch
    worker 1: 1RF0 1F0 1B0 1SB0 1U

The names before the colons are optional.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Schedule
from hetpipe.schedule.lanes import row_names, row_workers

WINDOW = 5  # cells shown on each side of a mark


def format_grid(schedule: Schedule, marks: Mapping[int, int] | None = None) -> str:
    """Return the rows of a schedule as text. `marks` has, by row, the index of an action, which is
    printed as `[1F0]`.

    With marks, a row shows only the cells around its mark. A row without a mark shows the cells
    around the index of the first mark. An index past the end of a row marks the place of a missing
    action, as `[?]`.
    """
    marks = marks or {}
    centre = next(iter(marks.values()), None)
    names = row_names(row_workers(schedule))
    return "\n".join(
        f"{name}: {_row([str(action) for action in row], marks.get(index), centre)}"
        for index, (name, row) in enumerate(zip(names, schedule, strict=True))
    )


def _row(cells: list[str], mark: int | None, centre: int | None) -> str:
    middle = mark if mark is not None else centre
    lo = 0 if middle is None else max(0, min(middle, len(cells)) - WINDOW)
    hi = len(cells) if middle is None else middle + WINDOW + 1
    shown = [f"[{cell}]" if lo + i == mark else cell for i, cell in enumerate(cells[lo:hi])]
    if mark is not None and mark >= len(cells):
        shown.append("[?]")
    before, after = ["..."] if lo else [], ["..."] if hi < len(cells) else []
    return " ".join(before + shown + after)


def print_schedule(schedule: Schedule) -> str:
    """Return the text of a schedule, one line per row. `parse_schedule` reads it."""
    return format_grid(schedule)


def parse_schedule(text: str) -> Schedule:
    """Parse the text of a schedule, with or without the names of its rows.

    A # begins a comment. Raises `ScheduleError` for a word that is not an action, for workers out
    of order and for text without a row. Whether the schedule can run is not checked; `validate`
    does that.
    """
    rows: list[tuple[Action, ...]] = []
    heads: list[tuple[int, int, str]] = []  # line, row, name
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        head = re.match(r"(worker [0-9]+( lane [0-9]+)?):", content)
        if head:
            heads.append((number, len(rows), head[1]))
        try:
            rows.append(tuple(map(Action.parse, content[head.end() if head else 0 :].split())))
        except ScheduleError as error:
            raise ScheduleError(f"line {number}: {error}") from error
    if not rows:
        raise ScheduleError(
            "line 1: no rows; write one line of actions per worker, such as 0F0 0B0 0U"
        )
    schedule = tuple(rows)
    names = row_names(row_workers(schedule))
    for number, row, name in heads:
        if name != names[row]:
            raise ScheduleError(
                f"line {number}: {name[:40]} where {names[row]} is next; "
                "list the workers in order, from 0"
            )
    return schedule
