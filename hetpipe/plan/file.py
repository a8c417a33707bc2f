"""Plans in files, with their costs, so that `train` need not measure them again."""

from __future__ import annotations

from pathlib import Path

from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.files import write_json
from hetpipe.plan.plan import Plan
from hetpipe.records import Source, read_json
from hetpipe.words import short, words


def write_plan(path: Path, plan: Plan, costs: CostTable | None) -> None:
    """Write a plan as JSON, its costs under the key `costs`. Raises `HetpipeError`."""
    kept = {} if costs is None else {"costs": costs.to_json()}
    write_json(path, plan.to_json() | kept)


def read_plan(path: Path) -> tuple[Plan, CostTable | None]:
    """A plan, and its costs if the file keeps them.

    Raises `PlanError`, or `CostError` for the costs, with the file and the place in it.
    """
    data = read_json(path, PlanError)
    costs = data.pop("costs", None) if isinstance(data, dict) else None
    plan = Plan.from_json(data, str(path))
    if costs is None:
        return plan, None
    table = CostTable.from_json(costs, f"{path}: costs")
    _check_fit(plan, table, Source("the plan", PlanError, str(path)))
    return plan, table


def _check_fit(plan: Plan, table: CostTable, source: Source) -> None:
    """Raises `PlanError` if the costs are another model's or lack a device."""
    names = tuple(layer.name for layer in table.layers)
    if names != plan.layers:
        why = f"has {len(names)} layers, not the plan's {len(plan.layers)}: of another model"
        raise source.fault(("costs", "layers"), why)
    for device in plan.all_devices:
        if device not in table.devices:
            why = f"has {words(table.devices)} and lacks {short(device)}, which the plan names"
            raise source.fault(("costs", "devices"), why)
