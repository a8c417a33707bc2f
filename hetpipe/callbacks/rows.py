"""CSV: writes the history of a fit as a table."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from hetpipe.callbacks.base import Callback, State
from hetpipe.callbacks.history import COUNTS, Epoch
from hetpipe.files import user_path, write_beside


class CSV(Callback):
    """Writes a row for each epoch, under the names of its values. A resumed fit keeps its rows."""

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
        table = csv.DictWriter(text, [*COUNTS, *state.names], lineterminator="\n")
        table.writeheader()
        names = {*table.fieldnames}
        table.writerows(
            {name: value for name, value in row.items() if name in names}
            for row in state.history.rows()
        )
        write_beside(self.path, text.getvalue())
