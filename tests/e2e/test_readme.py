"""The README and its pages are true: commands, options, schedules and links exist."""

from __future__ import annotations

import inspect
import re
import shlex
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
README, COMMANDS_PAGE, SCHEDULES_PAGE, OPTIONS_PAGE = (
    (ROOT / name).read_text(encoding="utf-8")
    for name in ("README.md", "docs/commands.md", "docs/schedules.md", "docs/options.md")
)
SHOWN = re.findall(r"^    hetpipe (.+)$", README + COMMANDS_PAGE, re.MULTILINE)


def section(page: str, title: str) -> str:
    """Return the text under a heading, up to the next heading."""
    return re.split(r"\n#+ ", page.split(f"# {title}\n")[1])[0]


def split(line: str) -> tuple[Any, list[str]]:
    """Return the command of a line and its arguments."""
    command: Any = typer.main.get_command(app)
    words = shlex.split(line, comments=True)
    while words and words[0] in getattr(command, "commands", {}):
        command, *words = command.commands[words[0]], *words[1:]
    return command, words


def options_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts} | {"--help"}


def shipped_schedules() -> set[str]:
    """Return the names of hetpipe's schedules; other tests may have registered more."""
    makers = {name: rule_of(name).passes.__module__ for name in schedule_names()}
    return {
        name for name, module in makers.items()
        if module.startswith("hetpipe.schedule.") and module != "hetpipe.schedule.fixed"
    }  # fmt: skip


@pytest.mark.parametrize("line", SHOWN)
def test_a_command_has_the_options_on_the_pages(line: str) -> None:
    command, words = split(line)
    runs = not getattr(command, "commands", {}) or command.invoke_without_command
    assert runs or words == ["--version"], "no such command"
    assert {word for word in words if word.startswith("--")} <= options_of(command)


def test_every_command_is_shown() -> None:
    shown = {line.partition("  ")[0].split(" ")[0] for line in SHOWN}
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
        (("doctor", "devices"), {"--json"}),
    ],
)  # fmt: skip
def test_commands_share_the_listed_options(commands: tuple[str, ...], options: set[str]) -> None:
    text = section(COMMANDS_PAGE, "Shared options")
    for name in commands:
        command, _ = split(name)
        assert options <= options_of(command), name
    assert all(f"`{option}" in text for option in options)


def test_the_table_has_every_keyword_of_a_pipeline() -> None:
    named = re.findall(r"^\| `(\w+)` \|", OPTIONS_PAGE, re.MULTILINE)
    parameters = inspect.signature(Pipeline.__init__).parameters.values()
    keywords = [
        parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY
    ]
    assert sorted(named) == sorted([*keywords, *Options.__annotations__])


def test_the_tables_have_every_schedule_and_weight_policy() -> None:
    for title, names in (
        ("Which one should I choose?", shipped_schedules()),
        ("Weights of asynchronous schedules", set(weights._policies)),
    ):
        rows = re.findall(r"^\| `([\w-]+)` \|", section(SCHEDULES_PAGE, title), re.MULTILINE)
        assert sorted(rows) == sorted(names)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_linked_files_exist(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_two_commands_are_targets_of_make_and_ci_runs_the_tests() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^    make (\w+)", README, re.MULTILINE)
    assert targets == ["bench", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    ci = ROOT / ".ci" / "run"
    assert not ci.exists() or ci.read_text(encoding="utf-8").rstrip().endswith("make test")


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 910
