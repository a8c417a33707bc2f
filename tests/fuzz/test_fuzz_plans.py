"""Plans in files: errors name the place, and a plan that is read can be shown, saved, simulated."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from damage import changed, damaged_json, dumped
from documents import COSTS, IN_JSON, PLAN
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st
from invented import values

from hetpipe.errors import CostError, HetpipeError, PlanError, ScheduleError
from hetpipe.plan import Plan, read_plan, write_plan
from hetpipe.plan.plan import VERSION
from hetpipe.plan.simulation import simulate
from hetpipe.schedule.rule import schedule_names

TOPOLOGY = {
    "latency_s": 1e-6, "bandwidth_Bps": 1e9, "shape": "switch", "duplex": "full",
    "all_reduce_Bps": None,
}  # fmt: skip
DESCRIBED = COSTS | {
    "links": [],
    "cluster": {
        "devices": [
            {"id": id, "like": id, "memory_domain": id, "server": "s"} for id in COSTS["devices"]
        ],
        "servers": [{"name": "s", "inside": TOPOLOGY}],
        "network": None,
    },
}
USE: tuple[type[HetpipeError], ...] = (PlanError, ScheduleError, CostError)


def attempt(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    read = result_of(lambda: read_plan(path), (PlanError, CostError))
    if isinstance(read, str):
        assert re.search(IN_JSON, read.removeprefix(str(path))), read
        return REFUSED
    plan, costs = read
    result_of(lambda: str(plan), USE)
    write_plan(path, plan, costs)
    assert read_plan(path) == (plan, costs)
    if costs is not None and plan.microbatches <= 8:
        result_of(lambda: simulate(plan, costs), USE)
    return ACCEPTED


def fitted(plan: dict[str, Any]) -> dict[str, Any]:
    """Return stages that cover the layers in order, each with its devices."""
    plan["layers"] = [f"{number}" for number in range(len(plan["stages"]))]
    for number, stage in enumerate(plan["stages"]):
        stage |= {"lo": number, "hi": number + 1, "in_flight": 1 + stage["in_flight"] % 9}
        stage["shares"] = [1.0 for _ in stage["devices"]]
    plan["microbatches"] = 1 + plan["microbatches"] % 9
    plan["mini_batch"] = max(plan["mini_batch"], plan["microbatches"])
    plan |= {"cut_nbytes": [9] * (len(plan["stages"]) - 1), "splits": [], "version": VERSION}
    return plan


@pytest.mark.slow
def test_damaged(tmp_path: Path) -> None:
    files = damaged_json(
        st.sampled_from([PLAN, *(PLAN | {"costs": each} for each in (COSTS, DESCRIBED))])
    )
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "p.json", content)))


@pytest.mark.slow
def test_invented(tmp_path: Path) -> None:
    names = st.fixed_dictionaries(
        {
            "schedule": st.sampled_from(schedule_names()),
            "weights": st.sampled_from(["flush", "stash", "2bw", "vertical-sync"]),
        }
    )
    whole = st.tuples(values(Plan, strict=True).map(fitted), names).map(lambda p: p[0] | p[1])
    loose = values(Plan).map(with_version)
    files = (whole | whole | changed(whole) | loose).map(dumped)
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "p.json", content)))


def with_version(plan: Any) -> Any:
    return plan | {"version": VERSION} if isinstance(plan, dict) else plan


def test_written_plans_are_standard_json(tmp_path: Path) -> None:
    write_plan(tmp_path / "p.json", Plan.from_json(PLAN), None)
    json.loads((tmp_path / "p.json").read_text(), parse_constant=lambda word: 1 / 0)
