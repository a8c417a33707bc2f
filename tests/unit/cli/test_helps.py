"""The help of every command shows its texts whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from hetpipe.cli.app import app


def commands(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield names, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *names, name)


COMMANDS = dict(commands(get_command(app)))


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_no_bracket_is_lost_or_doubled(names: tuple[str, ...]) -> None:
    """Rich reads `[word]` as a style and does not print it, unless a backslash precedes it."""
    done = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "80"})
    usage = next(line for line in done.stdout.splitlines() if "usage:" in line.lower())
    assert not re.search(r"\[\[|\]\]|\.\.\.\]", usage)
    for parameter in COMMANDS[names].params:
        help = parameter.help or ""
        assert Text.from_markup(help).plain == help.replace("\\[", "["), parameter.name
