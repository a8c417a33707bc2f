"""Runs the Python code of a page in a new process, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cache_folders import new_cache

DOCS = Path(__file__).parents[2] / "docs"


def run_page(name: str, blocks: int, folder: Path) -> str:
    """Run the Python code of a page, which has `blocks` blocks, in a folder; return the output."""
    found = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == blocks
    return run_python(["-c", "\n".join(found)], folder)


def run_python(arguments: Sequence[str], folder: Path) -> str:
    """Run Python in a folder, with a new cache; return the output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "HETPIPE_CACHE": new_cache(folder / "cache")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
