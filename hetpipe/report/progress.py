"""Progress on standard error: a bar in a terminal, lines of text elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]

EVERY_S = 10.0  # seconds between two lines about one phase


def is_watched() -> bool:
    """Return whether a person reads standard error: in a terminal or a notebook."""
    if sys.stderr is None:
        return False
    try:
        if sys.stderr.isatty():
            return True
    except ValueError:  # it is closed
        return False
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


@contextmanager
def progress_bar(phase: str = "") -> Iterator[Progress]:
    """Yield a callable (text, done, total) that shows the progress; `phase` is the first text."""
    from hetpipe.report.tables import console as console_of  # it loads rich

    console = console_of(stderr=True)
    if console.is_jupyter or not console.is_terminal:
        with Lines(_write).beating() as lines:
            if phase:
                lines.show(phase, 0, 1)
            yield lines.show
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(phase, total=1 if phase else None)
        yield lambda text, done, total: bar.update(
            task, description=text, completed=done, total=total
        )


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Lines:
    """Progress as lines of text: a line when a phase begins, and one every `every_s` seconds until
    it ends."""

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
                done, total = self._count
                if self._text and done < max(total, 1):
                    self._write(f"{self._text}{self._far()}")

    def _far(self) -> str:
        done, total = self._count
        steps = f"{done} of {total}, " if total > 1 else ""
        return f": {steps}{time.monotonic() - self._begin_s:.0f} s"
