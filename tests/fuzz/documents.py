"""Documents written by hetpipe and by other programs, as a start for damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"


def document(name: str) -> Any:
    return json.loads((DATA / name).read_text())


PLAN, COSTS, TIMELINE = (document(f"{name}.json") for name in ("plan", "costs", "timeline"))
IN_JSON = r"^(:\d+)?: \S"
"""The text after the file's name in an error: the line of invalid JSON, or a place in the data."""
