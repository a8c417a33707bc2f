"""Captures that are kept on disk, so that a second start of the same model need not export it.

An entry is a file of its own, in the user's cache folder: a checksum, and pickled records. A reader
sees all of it or nothing. Entries that are
damaged are made again; files of other users are not read.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetpipe.caches import CacheWarning, cache_folder
from hetpipe.errors import HetpipeError
from hetpipe.files import write_beside

ENVIRONMENT = "HETPIPE_CACHE"
MOST = 200  # entries; beyond, the oldest go
CHECKSUM_NBYTES = hashlib.sha256().digest_size


def key_of(*parts: object) -> str:
    """The name of an entry: a hash of everything on which its content depends."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def load(key: str) -> Any:
    """The content of an entry; None if there is none. Warns with `CacheWarning` if it is damaged,
    or belongs to another user."""
    path = _path(key)
    try:
        with path.open("rb") as file:
            if os.name == "posix" and (owner := os.fstat(file.fileno()).st_uid) != os.getuid():
                raise ValueError(f"it belongs to user {owner}")
            checksum, content = file.read(CHECKSUM_NBYTES), file.read()
        if hashlib.sha256(content).digest() != checksum:
            raise ValueError("its checksum does not match its content")
        return pickle.loads(content)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a pickle of another time raises
        text = f"cache entry {path} is not used and will be made again: {error}"
        warnings.warn(text, CacheWarning, stacklevel=2)
        return None


def store(key: str, content: Any) -> None:
    """Store an entry. Warns with `CacheWarning` if that fails, as on a full disk, and goes on."""
    path = _path(key)
    data = pickle.dumps(content, protocol=5)
    checksum = hashlib.sha256(data).digest()
    try:
        write_beside(path, lambda beside: beside.write_bytes(checksum + data))
    except HetpipeError as error:
        warnings.warn(str(error), CacheWarning, stacklevel=2)
        return
    _prune(path.parent)


def _path(key: str) -> Path:
    return cache_folder("captures", ENVIRONMENT) / f"{key}.pickle"


def _prune(folder: Path) -> None:
    """Delete the oldest entries where there are too many."""
    entries = sorted(folder.glob("*.pickle"), key=_age_s)
    for path in entries[:-MOST]:
        with suppress(OSError):  # another process deletes it, or it is not ours
            path.unlink()


def _age_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has deleted it
        return 0.0
