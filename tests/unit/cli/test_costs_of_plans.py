"""`hetpipe simulate --costs` refuses costs that do not fit the plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.errors import CostError

DATA = Path(__file__).parents[2] / "data"


def fewer_layers(costs: dict[str, Any]) -> None:
    costs["layers"].pop()
    for device in costs["devices"].values():
        device["layers"].pop()


def other_names(costs: dict[str, Any]) -> None:
    costs["layers"][0]["name"] = "other"


def other_device(costs: dict[str, Any]) -> None:
    costs["devices"]["numpy:cpu:7"] = costs["devices"].pop("numpy:cpu:0#1")
    costs["links"] = []


def other_samples(costs: dict[str, Any]) -> None:
    costs["samples"] *= 2


@pytest.mark.parametrize(
    ("change", "place", "reason"),
    [
        (fewer_layers, "layers", "give costs of the plan's model"),
        (other_names, "layers", "give costs of the plan's model"),
        (other_device, "devices", "lacks 'numpy:cpu:0#1'"),
        (other_samples, "samples", "profile with --microbatches"),
    ],
)
def test_costs_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], place: str, reason: str
) -> None:
    costs = json.loads((DATA / "costs.json").read_text())
    change(costs)
    path = tmp_path / "c.json"
    path.write_text(json.dumps(costs))
    done = CliRunner().invoke(app, ["simulate", str(DATA / "plan.json"), "--costs", str(path)])
    assert isinstance(done.exception, CostError)
    assert f"c.json: {place} " in str(done.exception)
    assert reason in str(done.exception)
