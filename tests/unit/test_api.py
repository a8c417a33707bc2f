"""docs/api.md lists every public name, and every listed name can be imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from hetpipe._lazy import index_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
IMPORT = re.compile(r"^ *from (hetpipe[\w.]*) import ([\w, ]+)$", re.MULTILINE)
MODULE = re.compile(r"hetpipe(?:\.[a-z_]\w*)*")


def listed_names() -> set[str]:
    """Return the names of the page's tables, with their modules.

    A row begins with its module, or the heading above the table gives the module.
    """
    names = set()
    module = ""
    for line in PAGE.splitlines():
        if line.startswith("#"):
            module = "".join(MODULE.findall(line))
        if line.startswith("| `"):
            first, second = line.split("|")[1:3]
            in_row = not module
            names |= {
                f"{module or first.strip(' `')}.{name}"
                for name in re.findall(r"`(\w+)`", second if in_row else first)
            }
    return names


LISTED = listed_names()


def indexed_names() -> Iterator[str]:
    for path in (ROOT / "hetpipe").rglob("__init__.py"):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        yield from (f"{package}.{name}" for name in index_of(ast.parse(path.read_text()), package))


def shown_names() -> Iterator[str]:
    """Yield the names that users see: in the README, on the pages and in the examples."""
    paths = [ROOT / "README.md", *(ROOT / "docs").glob("*.*"), *(ROOT / "examples").glob("*.py")]
    for path in paths:
        if path.suffix in (".md", ".py"):
            text = path.read_text(encoding="utf-8")
            for module, names in IMPORT.findall(text):
                yield from (f"{module}.{name.split(' as ')[0]}" for name in names.split(", "))
            yield from (f"hetpipe.{name}" for name in re.findall(r"\bhp\.([A-Za-z_]\w*)", text))
            yield from (f"hetpipe.sdk.{name}" for name in re.findall(r"\bsdk\.([A-Z]\w*)", text))


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_listed_name_can_be_imported(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert hasattr(import_module(module), attribute)


def test_the_page_lists_every_index_completely() -> None:
    assert len(LISTED) > 100
    assert set(indexed_names()) - LISTED == set()


def test_the_page_lists_every_name_that_users_see() -> None:
    packages = {f"hetpipe.{name}" for name in ("sdk", "cluster", "study")}
    assert set(shown_names()) - LISTED - packages == set()
