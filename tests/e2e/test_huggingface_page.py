"""The code on docs/huggingface.md runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 3
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        env={**os.environ, "HETPIPE_CACHE": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^losses \[\S+, \S+\]$", done.stdout, re.MULTILINE)
    assert re.search(r"^{'eval_loss': \S+}$", done.stdout, re.MULTILINE)
    assert {"trained", "run", "best"} <= {path.name for path in tmp_path.iterdir()}
