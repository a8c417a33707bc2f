"""The pages that explain the engine name files, classes and locks that exist."""

from __future__ import annotations

import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = re.compile(r"(?:self\.)?(\w+)\s*=\s*threading\.(?:R?Lock|Condition)\(")
PAGES = ("life-of-a-micro-batch.md", "threads.md")


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_files_that_a_page_names_exist(name: str) -> None:
    files = re.findall(r"`((?:hetpipe|backends)/[\w/]+\.py)`", page(name))
    assert len(files) > 10
    assert [file for file in files if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("name", PAGES)
def test_classes_that_a_page_names_with_their_file_exist(name: str) -> None:
    """Check names such as `Crew.post` (`hetpipe/crew/crew.py`)."""
    named = re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`\s+\(`(hetpipe/[\w/]+)\.py`\)", page(name))
    for owner, member, file in named:
        module = importlib.import_module(file.replace("/", "."))
        assert hasattr(module, owner), f"{file} has no {owner}"
        assert not member or hasattr(getattr(module, owner), member), f"{owner}.{member}"


def test_every_lock_of_the_engine_is_on_the_page() -> None:
    text = page("threads.md")
    for path in (*ROOT.glob("hetpipe/**/*.py"), *ROOT.glob("backends/**/*.py")):
        for lock in LOCK.findall(path.read_text(encoding="utf-8")):
            row = [
                line for line in text.splitlines()
                if str(path.relative_to(ROOT)) in line and line.startswith("|")
            ]  # fmt: skip
            assert any(lock in line for line in row), f"{lock} of {path} is missing"


def test_the_picture_of_the_readme_shows_that_balance_pays() -> None:
    names = runpy.run_path(str(ROOT / "docs" / "timeline.py"))
    even, balanced = names["step"]("even", 6), names["step"]("balanced", 8)
    assert balanced.step_s < 0.8 * even.step_s
    assert min(balanced.busy_share()) > 0.8 > min(even.busy_share())
    assert "docs/timeline.png" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert (ROOT / "docs" / "timeline.png").is_file()
