"""Cost files: reads the tables that `hetpipe profile --json` writes."""

from __future__ import annotations

from pathlib import Path

from hetpipe.cost.table import CostTable
from hetpipe.errors import CostError
from hetpipe.records import read_json


def read_costs(path: Path) -> CostTable:
    """Read a cost table from a JSON file. Raises `CostError` with the file and the place in it."""
    return CostTable.from_json(read_json(path, CostError), str(path))
