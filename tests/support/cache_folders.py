"""Folders for HETPIPE_CACHE that share with the user's caches what is slow to make again."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_path

SHARED = ("opencl", "selftests")
"""Caches with programs and results that depend on devices, not on what a test does."""


def new_cache(folder: Path) -> str:
    """Make a folder whose caches are empty, apart from the shared ones; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in SHARED:
        there, link = user_cache_path("hetpipe") / kind, folder / kind
        there.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(there)
    return str(folder)
