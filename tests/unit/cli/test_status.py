"""Agents of other hosts must hear how a command ended, when Python itself ends."""

from __future__ import annotations

import sys

import pytest

from hetpipe import cli


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["boards", "--no-such-option"], 2), (["zoo", "--list", "x"], 2), (["--version"], 0)],
)
def test_a_failed_command_leaves_its_error(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hetpipe", *arguments])
    monkeypatch.setattr(cli, "end_on_interrupt", lambda: None)
    monkeypatch.setattr(sys, "last_value", None, raising=False)  # so the test's end restores it
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert (ended.value.code or 0) == status
    assert (sys.last_value is ended.value) is bool(status)
