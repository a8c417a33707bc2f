"""Files that commands write for each other: a plan with its costs, and a table of costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe.cost.table import CostTable
from hetpipe.errors import CostError, PlanError
from hetpipe.plan.plan import Plan
from hetpipe.report.files import write_json

if TYPE_CHECKING:
    from hetpipe.simulate.timeline import Timeline


def write_plan(path: Path, plan: Plan, costs: CostTable) -> None:
    """Keep a plan and the costs that it was made with. Raises `HetpipeError`."""
    write_json(path, {**plan.to_json(), "costs": costs.to_json()})


def read_plan(path: Path) -> tuple[Plan, CostTable | None]:
    """A plan, and its costs if it was kept with them. Raises `PlanError`, `CostError`."""
    try:
        data = _read(path)
        costs = data.pop("costs", None)
        return Plan.from_json(data), None if costs is None else CostTable.from_json(costs)
    except (OSError, ValueError) as error:
        raise PlanError(f"cannot read the plan {path}: {error}") from error


def read_costs(path: Path) -> CostTable:
    """The table that `hetpipe profile --json` wrote. Raises `CostError`."""
    try:
        return CostTable.from_json(_read(path))
    except (OSError, ValueError) as error:
        raise CostError(f"cannot read the costs {path}: {error}") from error


def write_trace(path: Path, timelines: Sequence[Timeline]) -> None:
    """Write timelines as a Chrome trace, a process each. Raises `HetpipeError`."""
    events = [
        {
            "name": str(span.action), "ph": "X", "pid": number, "tid": span.worker,
            "ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6,
        }
        for number, timeline in enumerate(timelines)
        for span in timeline.spans
    ]  # fmt: skip
    write_json(path, {"traceEvents": events})


def _read(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("it holds no JSON object")
    return data
