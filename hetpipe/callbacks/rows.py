"""CSV: writes the history of a fit as a table."""

from __future__ import annotations

import csv
import io
from itertools import chain
from pathlib import Path

from hetpipe.callbacks.base import Callback, State
from hetpipe.callbacks.history import COUNTS, Epoch
from hetpipe.files import user_path, write_beside


class CSV(Callback):
    """Writes a row for each epoch, under the names of its values. A resumed fit keeps its rows.

    A value that an epoch lacks is empty.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = user_path(path)

    def begin(self, state: State) -> None:
        """Write the head, and the rows before the resume. Raises `HetpipeError`."""
        self._write(state)

    def epoch(self, state: State, row: Epoch) -> None:
        """Write all rows again; a reader sees a whole table at every moment."""
        self._write(state)

    def _write(self, state: State) -> None:
        text = io.StringIO()
        rows = state.history.rows()
        names = dict.fromkeys(chain.from_iterable(rows or [[*COUNTS, *state.names]]))
        table = csv.DictWriter(text, names, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_beside(self.path, text.getvalue())
