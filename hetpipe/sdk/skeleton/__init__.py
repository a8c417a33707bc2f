"""The skeleton of a backend's package. docs/backends.md shows `backend.py` as a tutorial."""

from __future__ import annotations

import re
from pathlib import Path

from hetpipe.errors import HetpipeError
from hetpipe.files import write_beside
from hetpipe.sdk.host.validation import check_name

_PLACES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "backend.py": "hetpipe_{module}/__init__.py",
    "test_conformance.py": "tests/test_conformance.py",
}
"""Paths in a new package, by name of the file in this folder."""


def write_skeleton(name: str, folder: Path) -> list[Path]:
    """Write a package with backend `name` into `folder`, and return its files.

    Raises `HetpipeError` for a name that no id can have, and if one of the files exists already.
    """
    check_name(name, "a new backend")
    module = name.replace("-", "_")
    paths = {
        Path(__file__).with_name(ours): folder / place.format(module=module)
        for ours, place in _PLACES.items()
    }
    if present := [str(path) for path in paths.values() if path.exists()]:
        raise HetpipeError(f"{present[0]} is there already; give another --folder")
    for ours, path in paths.items():
        text = _renamed(ours.read_text(), name, module)
        write_beside(path, text)
    return list(paths.values())


def _renamed(text: str, name: str, module: str) -> str:
    camel = "".join(part.capitalize() for part in re.split("[-_]", name))
    text = text.replace("hetpipe_skeleton", f"hetpipe_{module}").replace("skeleton", name)
    return text.replace("Skeleton", camel)
