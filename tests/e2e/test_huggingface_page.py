"""The code on docs/huggingface.md runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import run_page


@pytest.mark.slow
def test_the_code_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    shown = run_page("huggingface.md", 3, tmp_path)
    assert re.search(r"^losses \[\S+, \S+\]$", shown, re.MULTILINE)
    assert re.search(r"^{'eval_loss': \S+}$", shown, re.MULTILINE)
    assert {"trained", "run", "best"} <= {path.name for path in tmp_path.iterdir()}
