"""The tests' own setting works with any torch."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch._export.utils


def test_a_torch_without_the_list_of_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._export.utils, "_materialize_cpp_cia_ops", raising=False)
    runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))
    assert not hasattr(torch._export.utils, "_materialize_cpp_cia_ops")
