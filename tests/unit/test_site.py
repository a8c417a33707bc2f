"""The pages build as a site without a warning, and the source files that they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
SOURCE = re.compile(r"`((?:hetpipe|backends|kernels|boards|tests|examples|docs)/[\w/.-]*)`")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """A page missing from the contents, a dead link and a dead anchor each give a warning."""
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/site/mkdocs.yml",
         "-d", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    built = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {Path(name).stem for name in PAGES} <= built
    for path in (tmp_path / "site").glob("*.html"):
        loaded = re.findall(r'(?:src|<link[^>]* href)="(https?://[^"]+)', path.read_text())
        assert loaded == [], f"{path.name} is incomplete without a network"


@pytest.mark.parametrize("name", PAGES)
def test_source_files_that_a_page_names_exist(name: str) -> None:
    files = SOURCE.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
    assert [file for file in files if not (ROOT / file).exists()] == []
