"""Fixed schedules: texts that list all passes, for fixed numbers of stages and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetpipe.errors import ScheduleError
from hetpipe.records import read_text
from hetpipe.schedule.action import Op, Schedule
from hetpipe.schedule.lanes import HAND_OVERS, row_workers
from hetpipe.schedule.requirements import HALVES
from hetpipe.schedule.rule import register_schedule
from hetpipe.schedule.text import parse_schedule
from hetpipe.schedule.validate import validate

PASSES = (Op.FORWARD, Op.BACKWARD, *HALVES, *HAND_OVERS)

_texts: dict[str, str] = {}


def register_text(name: str, text: str) -> None:
    """Register the schedule of a text (see `hetpipe.schedule.text`) under `name`.

    Only passes and messages between lanes are kept; `generate` adds all other actions. If the text
    has other actions, such as transfers or updates, the whole text must be a valid schedule. Raises
    `ScheduleError` if that schedule is invalid, or if another schedule has the name.
    """
    if _texts.get(name) == text:
        return
    schedule = parse_schedule(text)
    stages, count = _size(schedule)
    if any(a.op not in PASSES for row in schedule for a in row):
        validate(schedule, count)
    rows = tuple(tuple(a for a in row if a.op in PASSES) for row in schedule)

    workers = len(set(row_workers(rows)))

    def written(
        asked_stages: int,
        microbatches: int,
        in_flight: Sequence[int] | None,
        asked_workers: int | None = None,
    ) -> Schedule:
        on = asked_stages if asked_workers is None else asked_workers
        if (asked_stages, microbatches, on) != (stages, count, workers):
            raise ScheduleError(
                f"schedule {name} is written for {stages} stages on {workers} workers and "
                f"{count} micro-batches, not for {asked_stages} on {on} and {microbatches}"
            )
        return rows

    register_schedule(name, chunked=workers != stages)(written)
    _texts[name] = text


def register_file(path: Path) -> str:
    """Register a file's schedule under the file's name without suffix, and return that name. Raises
    `ScheduleError`."""
    text = read_text(path, ScheduleError)
    try:
        register_text(path.stem, text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    return path.stem


def _size(schedule: Schedule) -> tuple[int, int]:
    """Return the numbers of stages and micro-batches. Raises `ScheduleError` for missing
    forwards."""
    actions = [action for row in schedule for action in row]
    passes = [action for action in actions if action.op in PASSES]
    if not passes:
        raise ScheduleError("line 1: no pass; write one or more, such as 0F0 and 0B0")
    forwards = sum(action.op is Op.FORWARD for action in actions)
    last = max(actions, key=lambda action: action.stage)
    if last.stage >= max(forwards, 1):
        raise ScheduleError(
            f"{last} is of stage {last.stage}, but there are {forwards} forwards, and each stage "
            "needs one for every micro-batch: add the missing forwards, or number stages from 0"
        )
    stages, late = 1 + last.stage, max(passes, key=lambda action: action.number)
    if late.number >= max(forwards // stages, 1):
        raise ScheduleError(
            f"{late} is of micro-batch {late.number}, but {stages} stages have {forwards} "
            f"forwards, enough for {forwards // stages} micro-batches: add the missing forwards, "
            "or number micro-batches from 0"
        )
    return stages, 1 + late.number
