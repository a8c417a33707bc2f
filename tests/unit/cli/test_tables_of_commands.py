"""The tables of commands: no word is broken at 80 columns, and nothing is cut in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app

DATA = Path(__file__).parents[2] / "data"
PROFILE = (
    "--profile", str(DATA / "importers" / "metis.json"), "--samples", "8", "--cut-nbytes", "4096",
)  # fmt: skip
STUDY = (*PROFILE, "--cluster", "pipedream-a")
FAILURES = (*PROFILE, "--boards", "v100-pcie-16=2", "--hours", "1", "--repeats", "2")
WIDTH = 80


def words(text: str) -> set[str]:
    return {word for word in text.split() if not set(word) <= set("━┏┳┓┡╇┩└┴┘─├┼┤┃│")}


def printed(arguments: Sequence[str], env: dict[str, str | None]) -> str:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": str(WIDTH), **env})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("devices", "--backends", "numpy,pytorch"),
        ("boards",),
        ("boards", "pac-d5005"),
        ("kernels", "list"),
        ("simulate", str(DATA / "plan.json"), "--costs", str(DATA / "costs.json")),
        ("compare", *STUDY, "--planners", "even,exact"),
        ("whatif", *STUDY, "--planner", "exact"),
        ("capacity", *STUDY),
        ("failures", *FAILURES),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_terminal_shows_every_word_of_the_piped_table(arguments: Sequence[str]) -> None:
    piped = printed(arguments, {"FORCE_COLOR": None})
    shown = printed(arguments, {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "dumb"})
    assert "…" not in piped + shown
    assert words(piped) == words(shown)
    tables = [line for line in shown.splitlines() if line and line[0] in "┏┃┡│└├"]
    assert tables
    assert max(map(len, tables)) <= WIDTH
