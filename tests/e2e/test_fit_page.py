"""The code on docs/fit.md runs, and its table has every option."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hetpipe.loop.options import FitOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "fit.md").read_text(encoding="utf-8")


def test_the_table_has_every_option() -> None:
    options = PAGE.split("## Options")[1].split("##")[0]
    named = re.findall(r"^\| `(\w+)` \|", options, re.MULTILINE)
    assert sorted(named) == sorted(FitOptions.__annotations__)


@pytest.mark.slow
def test_the_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        env={**os.environ, "HETPIPE_CACHE": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^3 \S+ \S+ \S+\nbest epoch \d\nworst loss", done.stdout, re.MULTILINE)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4
