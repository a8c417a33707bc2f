"""`hetpipe train --rebalance`: its refusals, its output, and the table of its example."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cli.output import Output, logged
from hetpipe.errors import HetpipeError
from hetpipe.papers.rebalance import GROUP, main, table_of


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--cuts", "2"], r"cuts \[2\] say where every layer is"),
        (["--replicas", "2"], "replicas do not move"),
        (["--schedule", "zb-v"], "under zb-v layers do not move"),
        (["--schedule", "data-parallel"], "replicas do not move"),
    ],
)
def test_options_that_forbid_moves_are_refused_at_once(words: list[str], why: str) -> None:
    done = CliRunner().invoke(app, ["train", "nope", "--rebalance", "auto", *words])
    assert isinstance(done.exception, HetpipeError)
    with pytest.raises(HetpipeError, match=f"rebalance='auto': .*{why}"):
        raise done.exception


def test_logged_lines_are_shown() -> None:
    output = Output(None)
    output.console = Console(file=io.StringIO(), width=160)
    log = logging.getLogger("hetpipe")
    before = log.level
    with logged(output):
        log.info("step %d: layer 3 [head] moved", 7)
        log.debug("not this")
    log.info("nor this")
    assert isinstance(output.console.file, io.StringIO)
    assert output.console.file.getvalue() == "step 7: layer 3 [head] moved\n"
    assert (log.level, log.handlers) == (before, [])


def test_the_table_says_when_a_training_recovers() -> None:
    """The training recovers in the second group of the slow phase, and never in the phase after
    it."""
    rates = [100.0, 100.0, 100.0, 30.0, 58.0, 60.0, 60.0, 60.0, 60.0]
    bests = [100.0, 100.0, 100.0, 60.0, 60.0, 60.0, 100.0, 100.0, 100.0]
    lines = list(table_of(list(zip(rates, bests, strict=True)), 3 * GROUP))
    assert len(lines) == 1 + len(rates) + 2
    assert lines[5].split() == ["40..49", "58.0", "60.0", "0.97"]
    assert lines[-2] == "change at step 30: back at 0.90 of the best plan within 20 steps"
    assert lines[-1] == "change at step 60: back at 0.90 of the best plan not in this phase"


@pytest.mark.parametrize("steps", ["0", "5", "19"])
def test_a_phase_has_whole_groups(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", steps])
    assert f"--steps {steps}: give a multiple of 10" in capsys.readouterr().err
