"""The trace of `hetpipe plan` has the facts that the trace of `hetpipe simulate` has."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from hetpipe.cli.app import app

PROFILE = Path(__file__).parents[2] / "data" / "importers" / "metis.json"


def test_a_plans_trace_has_layers_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = CliRunner().invoke(
        app,
        ["plan", "--profile", str(PROFILE), "--samples", "8", "--cut-nbytes", "4096",
         "--cluster", "pipedream-a", "--planner", "exact", "--trace", str(path)],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["name"].partition(" of ")[0] for event in events if event["ph"] == "C"} == {
        "memory"
    }
    assert all("layers" in event["args"] for event in events if event["ph"] == "X")
