"""The cluster, the commands and the Python code of the page on planning run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.plan.planners.choice import PLANNERS

PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    text = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert text is not None
    (tmp_path / "lab.toml").write_text(text[1], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_commands(lab: Path) -> None:
    lines = re.findall(r"^    hetpipe (.*?)(?:\s+#.*)?$", PAGE, re.MULTILINE)
    assert len(lines) == 10
    needs_data = "reproduce", "failures --profile"
    for line in (line for line in lines if not line.startswith(needs_data)):
        arguments = shlex.split(line)
        if arguments[0] == "compare":
            arguments += ["--planners", "exact,bapipe,even"]  # all planners take half a minute
        if arguments[0] == "failures":
            arguments += ["--hours", "1"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, f"{line}: {done.output}"
    assert {"plan.json", "step.png", "step.json"} <= {path.name for path in lab.iterdir()}


def test_the_python(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    exec(compile(code[1], "planning.md", "exec"), {})
    assert "exact plan" in capsys.readouterr().out


def test_every_planner_is_in_the_table() -> None:
    table = PAGE[PAGE.index("## The planners") : PAGE.index("## Costs")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(PLANNERS)
