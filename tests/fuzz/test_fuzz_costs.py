"""Cost tables in files: errors name the place, and a table that is read can be used for a plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from damage import changed, damaged_json, dumped
from documents import COSTS, IN_JSON
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st
from invented import values

from hetpipe.cost import CostTable, read_costs
from hetpipe.cost.table import VERSION, _Table
from hetpipe.errors import CostError, PlanError
from hetpipe.plan.planner import make_plan
from hetpipe.plan.simulation import simulate

USE = (PlanError, CostError)


def attempt(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    table = result_of(lambda: read_costs(path), (CostError,))
    if isinstance(table, str):
        assert re.search(IN_JSON, table.removeprefix(str(path))), table
        return REFUSED
    assert CostTable.from_json(json.loads(json.dumps(table.to_json()))) == table
    if table.samples < 10**6 and len(table.layers) < 20:
        plan = result_of(lambda: planned(table), USE)
        if not isinstance(plan, str):
            result_of(lambda: (str(plan), simulate(plan, table)), USE)
    return ACCEPTED


def planned(table: CostTable) -> Any:
    members = list(table.devices)[:3]
    return make_plan(table, members, mini_batch=2 * table.samples, microbatches=2)


def fitted(table: dict[str, Any]) -> dict[str, Any]:
    """Give each device a time for every layer, and make links between existing devices."""
    layers, devices = table["layers"], list(table["devices"])
    for number, layer in enumerate(layers):
        layer["name"] = f"{number}"
    for device in table["devices"].values():
        device["layers"] = (device["layers"] * len(layers) + [_LAYER] * len(layers))[: len(layers)]
    pairs = [(one, other) for one in devices for other in devices if one != other]
    table["links"] = [
        link | {"source": one, "target": other}
        for link, (one, other) in zip(table["links"] * 6 or [_LINK] * 6, pairs, strict=False)
    ]
    for tied in table["tied"]:
        tied["layers"] = [0, len(layers) - 1]
    return table | {"version": VERSION}


_LAYER = {"forward_s": 1.0, "backward_s": 2.0, "update_s": 0.1, "reason": "", "spread": 0.0}
_LINK = {"latency_s": 0.0, "bandwidth_Bps": None, "label": "measured", "sum_speed": 1.0}


def test_damaged(tmp_path: Path) -> None:
    files = damaged_json(st.just(COSTS))
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "c.json", content)))


@pytest.mark.slow
def test_invented(tmp_path: Path) -> None:
    whole = values(_Table, strict=True).map(fitted)
    loose = values(_Table).map(with_version)
    files = (whole | whole | changed(whole) | loose).map(dumped)
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "c.json", content)))


def with_version(table: Any) -> Any:
    return table | {"version": VERSION} if isinstance(table, dict) else table
