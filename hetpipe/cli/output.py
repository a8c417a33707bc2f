"""Output of commands: tables for people, JSON for programs, errors, and progress."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    Progress = Callable[[str, int, int], None]

VERSION = 1  # of a command's JSON, unless the result contains a version


class Output:
    """The destination of a command's results. With `--json -`, text goes to standard error."""

    def __init__(self, json_target: str | None) -> None:
        from hetpipe.report.tables import console

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


EVERY_S = 10.0  # seconds between two lines about one phase


@contextmanager
def progress_bar(phase: str = "") -> Iterator[Progress]:
    """Yield a callable (text, done, total) that shows the progress; `phase` is the first text."""
    console = error_console()
    if not console.is_terminal:
        with Lines(_write).beating() as lines:
            if phase:
                lines.show(phase, 0, 1)
            yield lines.show
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(phase, total=1 if phase else None)
        yield lambda text, done, total: bar.update(
            task, description=text, completed=done, total=total
        )


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Lines:
    """Progress as lines of text: a line when a phase begins, and one every `every_s` seconds."""

    def __init__(self, write: Callable[[str], None], every_s: float = EVERY_S) -> None:
        self._write = write
        self._every_s = every_s
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._text = ""
        self._count = (0, 0)
        self._begin_s = 0.0

    def show(self, text: str, done: int, total: int) -> None:
        """Note the progress of a command; print a line at the start of a phase."""
        with self._lock:  # `_beat` reads the fields and writes lines in another thread
            self._count = (done, total)
            if text != self._text:
                self._text, self._begin_s = text, time.monotonic()
                self._write(text)

    @contextmanager
    def beating(self) -> Iterator[Lines]:
        """Write a line at intervals, from another thread, because a phase may take minutes."""
        thread = threading.Thread(target=self._beat, name="progress", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()

    def _beat(self) -> None:
        while not self._ended.wait(self._every_s):
            with self._lock:  # shared with `show`
                if self._text:
                    self._write(f"{self._text}{self._far()}")

    def _far(self) -> str:
        done, total = self._count
        steps = f"{done} of {total}, " if total > 1 else ""
        return f": {steps}{time.monotonic() - self._begin_s:.0f} s"
