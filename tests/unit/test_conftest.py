"""The tests' configuration works with any torch, and a test that ends its process fails alone."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch._export.utils


def test_a_torch_without_the_list_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._export.utils, "_materialize_cpp_cia_ops", raising=False)
    runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))
    assert not hasattr(torch._export.utils, "_materialize_cpp_cia_ops")


ENDS_ITS_PROCESS = """
import os
import time
import pytest

def test_ends_its_process(): os.abort()

@pytest.mark.parametrize("number", range(11))
def test_beside(number): time.sleep(0.2)
"""
"""The other tests take long enough for the end of a process to be known before it gets more
tests: xdist fails if it asks a process that has just ended."""


@pytest.mark.slow
def test_a_test_that_ends_its_process_fails_and_the_others_run(tmp_path: Path) -> None:
    """A distribution that hands whole files to workers would wait for the dead worker for ever."""
    makefile = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
    (options,) = re.findall(r"-m pytest (.*) --share", makefile)
    (tmp_path / "test_deadly.py").write_text(ENDS_ITS_PROCESS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options.split(), tmp_path],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "crashed while running 'test_deadly.py::test_ends_its_process'" in done.stdout
    assert "1 failed, 11 passed" in done.stdout
