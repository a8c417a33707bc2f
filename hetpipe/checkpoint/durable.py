"""Writes of files and folders that are complete on the disk when a call returns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file; its size and SHA-256. Its entry in the folder needs `sync` as well."""
    digest, nbytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            digest.update(part)
            nbytes += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return nbytes, digest.hexdigest()


def sync(directory: Path) -> None:
    """Write the folder's own entries, its names of files, to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make(directory: Path) -> None:
    """Make a folder and its parents, unless they exist."""
    if not directory.is_dir():
        make(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)
