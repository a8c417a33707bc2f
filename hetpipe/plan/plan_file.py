"""Plan files: plans with their costs, so that `train` need not measure the costs again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.files import write_json
from hetpipe.plan.described import table_from_json, table_to_json
from hetpipe.plan.plan import Plan
from hetpipe.records import Source, read_json
from hetpipe.words import short, words


def write_plan(path: Path, plan: Plan, costs: CostTable | None, workload: str = "") -> None:
    """Write a plan as JSON, its costs under the key `costs`. Raises `HetpipeError`.

    `workload` is the name by which commands know the model, if there is one.
    """
    kept = {} if costs is None else {"costs": table_to_json(costs)}
    named = {"workload": workload} if workload else {}
    write_json(path, plan.to_json() | named | kept)


def read_plan(path: Path) -> tuple[Plan, CostTable | None]:
    """Read a plan, and its costs if the file has them.

    Raises `PlanError`, or `CostError` for the costs, with the file and the place in it.
    """
    data = read_json(path, PlanError)
    costs = data.pop("costs", None) if isinstance(data, dict) else None
    _workload(data, path)
    plan = Plan.from_json(data, str(path))
    if costs is None:
        return plan, None
    table = table_from_json(costs, f"{path}: costs")
    check_fit(plan, table, Source("the plan", PlanError, str(path)), "costs")
    return plan, table


def read_workload(path: Path) -> str:
    """Read the name by which commands know the model; empty without one. Raises `PlanError`."""
    return _workload(read_json(path, PlanError), path)


def _workload(data: Any, path: Path) -> str:
    """Remove the model's name from a plan's data, and return it."""
    name = data.pop("workload", "") if isinstance(data, dict) else ""
    if not isinstance(name, str):
        source = Source("the plan", PlanError, str(path))
        raise source.fault(("workload",), f"is {short(name)}, it should be text")
    return name


def check_fit(plan: Plan, table: CostTable, source: Source, *place: str) -> None:
    """Raise the source's error if the costs belong to another model or lack a device. `place` is
    the place of the costs in the source."""
    names = tuple(layer.name for layer in table.layers)
    if names != plan.layers:
        why = (
            f"has {len(names)} layers that are not the plan's {len(plan.layers)} layers: give "
            "costs of the plan's model"
        )
        raise source.fault((*place, "layers"), why)
    for device in plan.all_devices:
        if device not in table.devices:
            why = f"has {words(table.devices)} and lacks {short(device)}, which the plan names"
            raise source.fault((*place, "devices"), why)
