"""Documents as hetpipe and others have written them, to be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"


def document(name: str) -> Any:
    return json.loads((DATA / name).read_text())


PLAN, COSTS, TIMELINE = (document(f"{name}.json") for name in ("plan", "costs", "timeline"))
IN_JSON = r"^(:\d+)?: \S"
"""What stands behind the file's name in a message: the line of what is no JSON, or a place."""
