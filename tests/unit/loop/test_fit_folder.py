"""One fit at a time holds its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetpipe.callbacks import Callback
from hetpipe.checkpoint.durable import locked
from hetpipe.errors import CheckpointError
from hetpipe.loop.loop import Loop
from hetpipe.loop.options import task_of


class Begun(Exception):
    """The fit called its callbacks."""


class Stop(Callback):
    def begin(self, state: Any) -> None:
        raise Begun


def fit(folder: Path) -> None:
    task = task_of(1, [(1, 2)], None, None, [Stop()], {"folder": folder})
    pipe: Any = None
    Loop(pipe, task, pipe, 1).run()


def test_a_second_fit_into_a_folder_is_refused_before_it_begins(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(CheckpointError, match=r"another fit.* give another fold"):
        fit(tmp_path)


def test_a_fit_that_fails_gives_its_folder_free(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(Begun):
            fit(tmp_path)
    with locked(tmp_path):
        pass


def test_a_fit_holds_its_folder_while_it_runs(tmp_path: Path) -> None:
    class Second(Callback):
        def begin(self, state: Any) -> None:
            fit(tmp_path)

    task = task_of(1, [(1, 2)], None, None, [Second()], {"folder": tmp_path})
    pipe: Any = None
    with pytest.raises(CheckpointError, match="another fit"):
        Loop(pipe, task, pipe, 1).run()
