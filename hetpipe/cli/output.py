"""Output of commands: tables for people, JSON for programs, and errors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

VERSION = 1  # of a command's JSON, unless the result contains a version


class Output:
    """The destination of a command's results. With `--json -`, text goes to standard error."""

    def __init__(self, json_target: str | None) -> None:
        from hetpipe.files import check_target
        from hetpipe.report.tables import console

        check_target(None if json_target in (None, "-") else Path(json_target))
        self._target = json_target
        self.console = console(stderr=json_target == "-")

    def text(self, text: str) -> None:
        """Print text without markup or highlighting."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def finish(self, data: Mapping[str, Any]) -> None:
        """Write the command's result as JSON if the user asked for JSON. Raises `HetpipeError`."""
        self._write({"version": VERSION, **data})

    def keep(self, data: Mapping[str, Any]) -> None:
        """Write the JSON file now, in case the command ends early. Raises `HetpipeError`."""
        if self._target != "-":
            self.finish(data)

    def finish_list(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a result that is a list, like `finish`. Raises `HetpipeError`."""
        self._write(rows)

    def _write(self, data: Any) -> None:
        from hetpipe.files import dump_json, write_json

        if self._target == "-":
            sys.stdout.write(dump_json(data))
        elif self._target is not None:
            write_json(Path(self._target), data)


@contextmanager
def logged(output: Output) -> Iterator[None]:
    """Print the lines that hetpipe logs inside the block."""
    logger, handler = logging.getLogger("hetpipe"), _Lines(output)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Lines(logging.Handler):
    """Prints log messages unchanged."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.text(record.getMessage())


def error_console() -> Console:
    """Return the console of standard error."""
    from hetpipe.report.tables import console

    return console(stderr=True)


def complain(message: str) -> None:
    """Print an error in red."""
    _say(message, "red")


def warn(message: str) -> None:
    """Print a warning in yellow."""
    _say(f"warning: {message}", "yellow")


def _say(message: str, style: str) -> None:
    error_console().print(message, style=style, markup=False, highlight=False, soft_wrap=True)
