"""What commands print: tables for people, JSON for programs, progress, and the one red line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    Progress = Callable[[str, int, int], None]


class Output:
    """Where a command's results go. With `--json -` people's text moves to standard error."""

    def __init__(self, json_target: str | None) -> None:
        from rich.console import Console

        self._target = json_target
        self.console = Console(stderr=json_target == "-")
        if not self.console.is_terminal:
            self.console = Console(stderr=json_target == "-", width=160)

    def text(self, text: str) -> None:
        """Print text as it is: brackets and numbers are not markup."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def finish(self, data: Any) -> None:
        """Write the command's result as JSON where that was asked for. Raises `HetpipeError`."""
        from hetpipe.report.files import dump_json, write_json

        if self._target == "-":
            sys.stdout.write(dump_json(data))
        elif self._target is not None:
            write_json(Path(self._target), data)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A callable (text, done, total) that draws a line per text on standard error.

    Nothing is drawn where standard error is not a terminal.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = error_console()
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal,
        transient=True,
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=None)

        def show(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        yield show


def error_console() -> Console:
    """Standard error."""
    from rich.console import Console

    return Console(stderr=True)


def complain(message: str) -> None:
    """Say in red what went wrong."""
    _say(message, "red")


def warn(message: str) -> None:
    """Say in yellow what may be wrong."""
    _say(f"warning: {message}", "yellow")


def _say(message: str, style: str) -> None:
    error_console().print(message, style=style, markup=False, highlight=False, soft_wrap=True)
