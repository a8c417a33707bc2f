"""The output of commands: log files, JSON, names with colons, notes and memory of plans."""

from __future__ import annotations

import io
import json
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest

from hetpipe.cli.output import Output, complain
from hetpipe.cli.plan import microbatches_of
from hetpipe.cli.train import memory_lines
from hetpipe.cost.table import CostTable
from hetpipe.environment import refuse_ranks
from hetpipe.errors import HetpipeError, PlanError
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.report.progress import Lines


def plan(step_s: float, *devices: str) -> Plan:
    stages = tuple(
        StagePlan(n, n + 1, (device,), 1, 1.0, 1.0, 0.0, 2**20, 2**30)
        for n, device in enumerate(devices)
    )
    layers = tuple(f"layer {n}" for n in range(len(devices)))
    cuts = (4,) * (len(devices) - 1)
    return Plan("m", layers, stages, "1f1b", 8, 2, step_s, cuts, "measured", "balanced")


def test_progress_prints_a_line_per_phase_and_at_intervals() -> None:
    """A log file must show progress within minutes."""
    lines: list[str] = []
    twice = threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        if len(lines) > 4:
            twice.set()

    with Lines(write, every_s=0.01).beating() as progress:
        progress.show("profiling", 0, 1)
        progress.show("training", 1, 9)
        for done in (2, 3):
            progress.show("training", done, 9)
        twice.wait()
    assert [line for line in lines if ":" not in line] == ["profiling", "training"]
    assert "training: 3 of 9, 0 s" in lines


@pytest.mark.parametrize(("done", "beats"), [(0, 2), (1, 0)])
def test_a_phase_that_has_ended_prints_no_more_lines(done: int, beats: int) -> None:
    """A recovery compiles while the script trains."""
    lines: list[str] = []
    progress = Lines(lines.append)
    progress._ended = Mock(wait=Mock(side_effect=[False, False, True]))
    progress.show("compiling", done, 1)
    progress._beat()
    assert lines == ["compiling"] + beats * ["compiling: 0 s"]


def test_a_name_between_colons_is_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    complain("package:factory:0 is wrong")
    output = Output(None)
    output.text("package:factory:1")
    output.console.print("package:factory:2")
    printed = capsys.readouterr()
    assert printed.err == "package:factory:0 is wrong\n"
    assert printed.out == "package:factory:1\npackage:factory:2\n"


def test_json_keeps_its_version_or_gets_version_1(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    Output("-").finish({"a": 1})
    assert json.loads(written.getvalue()) == {"version": 1, "a": 1}
    written.truncate(0)
    written.seek(0)
    Output("-").finish({"version": 2})
    assert json.loads(written.getvalue()) == {"version": 2}


def test_measured_and_planned_memory_are_shown() -> None:
    assert memory_lines(plan(1.0, "a", "b"), [3 * 2**19, 2**20], {"b": 2**21}) == [
        "memory of stage 0 on a: 1.5 MiB at most, measured (1 MiB planned)",
        "memory of stage 1 on b: 1 MiB at most, measured (1 MiB planned)",
        "memory in use on b: 2 MiB after a mini-batch, by its own count",
    ]


def test_the_costs_decide_the_number_of_micro_batches() -> None:
    costs = CostTable("m", 16, (), {})
    assert microbatches_of(costs, 128, None) == 8
    assert microbatches_of(costs, 128, 8) == 8
    with pytest.raises(PlanError, match=r"of 16 samples, but each of the 4 .* has 32"):
        microbatches_of(costs, 128, 4)
    with pytest.raises(PlanError, match=r"of 48 samples, but each of the 3 .* has 43"):
        microbatches_of(replace(costs, samples=48), 128, None)


def test_several_ranks_are_refused() -> None:
    refuse_ranks({})
    refuse_ranks({"WORLD_SIZE": "4"})
    refuse_ranks({"WORLD_SIZE": "1", "RANK": "0"})
    for rank in ("RANK", "LOCAL_RANK"):
        with pytest.raises(HetpipeError, match="process 2 of 4"):
            refuse_ranks({"WORLD_SIZE": "4", rank: "2"})


def test_a_name_that_a_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON can hold half of a surrogate pair; a terminal may know only ASCII."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stderr", terminal)
    complain("no costs for \ud800 and é")
    terminal.flush()
    assert terminal.buffer.getvalue() == b"no costs for \\ud800 and \\xe9\n"  # type: ignore[attr-defined]
