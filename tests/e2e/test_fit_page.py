"""The code on docs/fit.md runs, and its table has every option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import DOCS, run_page

from hetpipe.loop.options import FitOptions


def test_the_table_has_every_option() -> None:
    page = (DOCS / "fit.md").read_text(encoding="utf-8")
    options = page.split("## Options")[1].split("##")[0]
    named = re.findall(r"^\| `(\w+)` \|", options, re.MULTILINE)
    assert sorted(named) == sorted(FitOptions.__annotations__)


@pytest.mark.slow
def test_the_code_runs(tmp_path: Path) -> None:
    shown = run_page("fit.md", 5, tmp_path)
    assert re.search(r"^3 \S+ \S+ \S+\nbest epoch \d\nworst loss", shown, re.MULTILINE)
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 4
