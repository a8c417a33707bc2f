"""Documents as hetpipe and others have written them, to be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data"


def document(name: str) -> Any:
    return json.loads((DATA / name).read_text())


PLAN, COSTS, TIMELINE = (document(f"{name}.json") for name in ("plan", "costs", "timeline"))
IN_JSON = (
    r"^:\d+: |^: (costs: )?[a-z_]+\.\d|^: (costs: )?['a-zA-Z_.]+ (is|has|lacks)|devices\."
    r"|files\.|^: (costs: )?the (plan|cost table|timeline|manifest|profile) (lacks|has|is)"
    r"|the key|the number [-0-9]+|stages |splits|cut_nbytes|microbatches|nested too deeply"
    r"|(NaN|Infinity) is not JSON|cannot be read"
)
"""What a message says behind the file's name: line, or place in the document."""
