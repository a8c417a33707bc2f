"""The package list, the folders and the import names agree."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def packages_in(folder: str, name: str) -> set[str]:
    """Return the names of all packages in a folder."""
    top = ROOT / folder
    found = [path.parent.relative_to(top) for path in top.rglob("__init__.py")]
    return {".".join([name, *path.parts]) for path in found}


def test_every_package_folder_is_listed() -> None:
    folders: set[str] = set()
    for name, folder in SETUPTOOLS["package-dir"].items():
        folders |= packages_in(folder, name)
    assert set(SETUPTOOLS["packages"]) == folders


@pytest.mark.parametrize("folder", ["backends", "boards"])
def test_mapped_folders_refuse_an_import_and_name_the_right_one(folder: str) -> None:
    """In a checkout's root Python would find `backends/` under a wrong name."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"import hetpipe.{folder} instead" in done.stderr


@pytest.mark.slow
def test_transformers_can_be_used_from_a_checkouts_root() -> None:
    """transformers imports any package named `kernels`, and ignores one without a version."""
    code = "from transformers import BertModel"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_kernel_and_board_file_is_package_data() -> None:
    """A wheel would lack a `.cl` or `.toml` file that matches no listed pattern."""
    for name in ("hetpipe.kernels", "hetpipe.boards"):
        top = ROOT / SETUPTOOLS["package-dir"][name]
        data = {path for path in top.rglob("*") if path.suffix in {".cl", ".toml", ".h"}}
        shipped = {
            path for pattern in SETUPTOOLS["package-data"][name] for path in top.glob(pattern)
        }
        assert data == shipped


def test_the_parts_of_the_page_are_package_data() -> None:
    top = ROOT / "hetpipe" / "explain"
    patterns = SETUPTOOLS["package-data"]["hetpipe.explain"]
    shipped = {path.name for pattern in patterns for path in top.glob(pattern)}
    assert shipped == {"page.html", "page.css", "page.js"}


def test_the_headers_and_the_example_in_c_are_package_data() -> None:
    top = ROOT / "backends" / "native"
    patterns = SETUPTOOLS["package-data"]["hetpipe.backends.native"]
    shipped = {path for pattern in patterns for path in top.glob(pattern)}
    sources = {path for path in top.rglob("*") if path.is_file() and path.suffix in {".c", ".h"}}
    assert shipped == sources | {top / "example" / "Makefile"}


def test_import_is_lazy() -> None:
    """`import hetpipe` and the planner's room must not import torch or a driver."""
    code = (
        "import sys, hetpipe, hetpipe.plan.plan, hetpipe.simulate.timeline;"
        "sys.exit(bool({'torch', 'pyopencl'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
