"""Schedules that are written out, for one number of stages and of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Op, Schedule
from hetpipe.schedule.lanes import HAND_OVERS, row_workers
from hetpipe.schedule.rule import register_schedule
from hetpipe.schedule.text import parse_schedule
from hetpipe.schedule.validate import HALVES, validate

PASSES = (Op.FORWARD, Op.BACKWARD, *HALVES, *HAND_OVERS)

_texts: dict[str, str] = {}


def register_text(name: str, text: str) -> None:
    """Make a schedule known as `name`, out of its text (see `hetpipe.schedule.text`).

    Without transfers and updates these are added; with them the text is validated as it stands.
    Raises `ScheduleError` for text that is no schedule, that deadlocks, or whose name is taken.
    """
    if _texts.get(name) == text:
        return
    schedule = parse_schedule(text)
    stages = 1 + max((a.stage for row in schedule for a in row), default=-1)
    count = 1 + max((a.number for row in schedule for a in row if a.op in PASSES), default=-1)
    if any(a.op not in PASSES for row in schedule for a in row):
        validate(schedule, count)
    rows = tuple(tuple(a for a in row if a.op in PASSES) for row in schedule)

    workers = len(set(row_workers(rows)))

    def written(
        wanted: int, microbatches: int, in_flight: Sequence[int] | None, on: int | None = None
    ) -> Schedule:
        on = wanted if on is None else on
        if (wanted, microbatches, on) != (stages, count, workers):
            raise ScheduleError(
                f"schedule {name} is written for {stages} stages on {workers} workers and "
                f"{count} micro-batches, not for {wanted} on {on} and {microbatches}"
            )
        return rows

    register_schedule(name, chunked=workers != stages)(written)
    _texts[name] = text
