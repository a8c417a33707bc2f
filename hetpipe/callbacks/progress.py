"""Progress: a line that shows how far a fit is."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from hetpipe.callbacks.base import Callback, Result, State
from hetpipe.callbacks.history import Epoch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

EVERY_S = 0.1  # seconds between two drawings of the line


def error_console() -> Console:
    """Return a console of standard error."""
    from hetpipe.report.tables import console

    return console(stderr=True)


class Progress(Callback):
    """Shows epoch, mini-batch and loss in one line on standard error, and a line for each epoch.

    Outside of a terminal it only writes the line for each epoch.
    """

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._shown_s = 0.0

    def begin(self, state: State) -> None:
        """Show the line."""
        console = error_console()
        if console.is_jupyter or not console.is_terminal:
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=console, auto_refresh=False, transient=True,
        )  # fmt: skip
        self._bar.add_task("fit", total=None)
        self._bar.start()

    def step(self, state: State, result: Result) -> None:
        """Draw the line again, some times per second."""
        now_s = time.monotonic()
        if self._bar is not None and now_s - self._shown_s >= EVERY_S:
            self._shown_s = now_s
            text = f"epoch {state.epoch} of {state.epochs}, loss {result.loss:.4g}"
            self._bar.update(
                self._bar.task_ids[0], description=text, completed=state.batch,
                total=state.batches, refresh=True,
            )  # fmt: skip

    def epoch(self, state: State, row: Epoch) -> None:
        """Write the line of the epoch."""
        values = ", ".join(f"{name} {value:.4g}" for name, value in row.values.items())
        line = f"epoch {row.epoch} of {state.epochs}: {values} ({row.took_s:.1f} s)"
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self, state: State) -> None:
        """Remove the line."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
