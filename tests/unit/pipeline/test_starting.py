"""The progress of a start: shown in a terminal, silent elsewhere, and gone at the end."""

from __future__ import annotations

import io
import os
import pty
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hetpipe.pipeline import starting
from hetpipe.pipeline.starting import Starting
from hetpipe.report.progress import is_watched

COLD = {"exports": 1}


def shown_in_terminal(asked: Any, patch: pytest.MonkeyPatch, effort: dict[str, int]) -> str:
    """Return what a start writes to a terminal."""
    main, side = pty.openpty()
    with os.fdopen(side, "w") as terminal, os.fdopen(main, "rb", buffering=0) as reader:
        patch.setattr(sys, "stderr", terminal)
        patch.setenv("TERM", "xterm")
        start = Starting(asked)
        start.show("capturing", 0, 1)
        start.show("compiling 2 stages", 0, 1)
        start.end(effort)
        terminal.write("end")
        terminal.flush()
        text = b""
        while not text.endswith(b"end"):
            text += reader.read(4096)
    return text.decode()


def test_a_terminal_shows_the_progress_and_removes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown_in_terminal(None, monkeypatch, COLD)
    assert "compiling 2 stages" in text
    assert "\x1b[2K" in text.rpartition("compiling 2 stages")[2], "the bar's line is erased"
    assert "the start took" not in text


def test_a_slow_cold_start_names_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "SLOW_S", 0.0)
    text = shown_in_terminal(None, monkeypatch, COLD)
    assert "the next start of this model on these devices is shorter" in text
    assert os.environ["HETPIPE_CACHE"] in text.replace("\r\n", "")
    assert "the start took" not in shown_in_terminal(None, monkeypatch, {"exports": 0})


def test_false_is_silent_and_a_function_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_in_terminal(False, monkeypatch, COLD) == "end"
    told: list[tuple[str, int, int]] = []
    ask: Callable[[str, int, int], None] = lambda *each: told.append(each)  # noqa: E731
    assert shown_in_terminal(ask, monkeypatch, COLD) == "end"
    assert told == [("capturing", 0, 1), ("compiling 2 stages", 0, 1)]


def test_a_pipe_and_a_closed_stream_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    start = Starting(None)
    start.show("capturing", 0, 1)
    start.end(COLD)
    assert stream.getvalue() == ""
    stream.close()
    assert not is_watched()
    monkeypatch.setattr(sys, "stderr", None)
    assert not is_watched()
