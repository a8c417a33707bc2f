"""What the README shows is true: its script runs, its commands and options are those that exist."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from hetpipe.cli.app import app
from hetpipe.pipeline.options import Options
from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.schedule import schedule_names, weights
from hetpipe.schedule.rule import rule_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    hetpipe (.+)$", README, re.MULTILINE)


def section(title: str) -> str:
    """The text under a heading, to the next one."""
    return re.split(r"\n#+ ", README.split(f"# {title}\n")[1])[0]


def split(line: str) -> tuple[Any, list[str]]:
    """The command that a line names, and its arguments."""
    command: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)
    while words and words[0] in getattr(command, "commands", {}):
        command, *words = command.commands[words[0]], *words[1:]
    return command, words


def options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts} | {"--help"}


def own_schedules() -> set[str]:
    """Names of hetpipe's schedules; other tests may have registered more."""
    makers = {name: rule_of(name).passes.__module__ for name in schedule_names()}
    return {
        name for name, module in makers.items()
        if module.startswith("hetpipe.schedule.") and module != "hetpipe.schedule.fixed"
    }  # fmt: skip


def test_the_script_runs_and_learns(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    script = tmp_path / "script.py"
    script.write_text(code[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "HETPIPE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"^(?:step|\d+) (\S+)$", done.stdout, re.M)]
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    alone = re.search(r"^torch alone (\S+)$", done.stdout, re.M)
    assert alone is not None
    assert float(alone[1]) < losses[-1]
    for device in ("pytorch:cpu:0", "numpy:cpu:0"):
        assert re.search(rf"^\d .* {device} ", done.stdout, re.M), done.stdout


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_has_the_options_that_are_shown(line: str) -> None:
    command, words = split(line)
    assert not getattr(command, "commands", {}) or words == ["--version"], "no such command"
    assert {word for word in words if word.startswith("--")} <= options_of(command)


def test_every_command_is_shown() -> None:
    shown = {line.partition("  ")[0].split(" ")[0] for line in COMMANDS}
    assert set(typer.main.get_command(app).commands) <= shown  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("commands", "options"),
    [
        (
            ("profile", "plan", "train", "bench"),
            {"--cluster", "--devices", "--backends", "--emulate-speed", "--microbatches",
             "--mini-batch", "--json"},
        ),
        (("plan", "train", "bench"), {"--schedule"}),
        (("plan", "train"), {"--weights", "--cuts", "--replicas"}),
        (("doctor", "devices", "matmul"), {"--json"}),
    ],
)  # fmt: skip
def test_commands_share_the_options_that_are_listed(
    commands: tuple[str, ...], options: set[str]
) -> None:
    text = section("On the command line")
    for name in commands:
        command, _ = split(name)
        assert options <= options_of(command), name
    assert all(f"`{option}" in text for option in options)


def test_the_table_has_every_keyword_of_a_pipeline() -> None:
    named = re.findall(r"^\| `(\w+)` \|", section("Options of `hp.Pipeline`"), re.MULTILINE)
    parameters = inspect.signature(Pipeline.__init__).parameters.values()
    own = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    assert sorted(named) == sorted([*own, *Options.__annotations__])


def test_the_tables_have_every_schedule_and_weight_policy() -> None:
    rows = [
        line.split("|") for line in section("Schedules and weights").splitlines() if "|" in line
    ]
    for column, names in ((2, own_schedules()), (3, set(weights._policies))):
        named = re.findall(r"`([\w-]+)`", " ".join(row[column] for row in rows[1:]))
        assert set(named) == names


def test_files_that_are_linked_exist() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []
