"""The grid: a schedule as text, one row per worker, with cells marked."""

from __future__ import annotations

from collections.abc import Mapping

from hetpipe.schedule.action import Schedule
from hetpipe.schedule.lanes import row_names

WINDOW = 5  # cells shown on each side of a mark


def format_grid(schedule: Schedule, marks: Mapping[int, int] | None = None) -> str:
    """Return rows of actions in the order of each worker; `marks` (worker -> index) as `[1F0]`.

    With marks, a row shows only the cells around its mark; a row without a mark shows the cells
    around the first one. An index past the end of a row marks the place of a missing action.
    """
    marks = marks or {}
    centre = next(iter(marks.values()), None)
    return "\n".join(
        f"{name}: {_row([str(action) for action in row], marks.get(index), centre)}"
        for index, (name, row) in enumerate(zip(row_names(schedule), schedule, strict=True))
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
