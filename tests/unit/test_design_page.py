"""The design page names all rooms, only files that exist, and each word once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
WORDS = """device member worker stage replica mini-batch micro-batch sizes samples flush streaming
piece lane cut slot program frame store binding version policy rule schedule action script part
segment plan measured emulated modelled predicted saved tied crew controller wire edge transport"""


def rows(title: str) -> list[str]:
    """Return the first column of the tables in a section."""
    text = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    return list(re.findall(r"^\| ([^|\s][^|]*\S) +\|", text, re.MULTILINE))


def test_the_tables_have_every_room() -> None:
    named = [cell.strip("`") for cell in rows("Rooms") if cell.startswith("`")]
    rooms = {path.parent.name for path in (ROOT / "hetpipe").glob("*/__init__.py")}
    assert sorted(named) == sorted(rooms)


def test_files_that_the_page_names_exist() -> None:
    files = re.findall(r"`((?:hetpipe|backends|tests)/[\w/.]+)`", PAGE)
    assert len(files) > 30
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_glossary_has_each_word_once() -> None:
    words = [word for cell in rows("Glossary") for word in cell.split(", ")]
    assert len(words) == len(set(words))
    more = {"cost table", "in flight", "stages per worker", "inlet", "outlet"}
    assert {*WORDS.split(), *more} <= set(words)
