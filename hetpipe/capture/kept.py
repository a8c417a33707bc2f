"""Captures that are kept on disk, so that a second start of the same model need not export it."""

from __future__ import annotations

import pickle
from typing import Any

from hetpipe.entries import Entries, key_of

__all__ = ["key_of", "load", "store"]

ENTRIES = Entries("captures", "pickle", most=200, variable="HETPIPE_CACHE")


def load(key: str) -> Any:
    """The content of an entry; None if there is none. Warns with `CacheWarning` if it is damaged,
    or belongs to another user."""
    data = ENTRIES.load(key)
    if data is None:
        return None
    try:
        return pickle.loads(data)
    except Exception as error:  # whatever a pickle of another time raises
        ENTRIES.refuse(key, error)
        return None


def store(key: str, content: Any) -> None:
    """Store an entry. Warns with `CacheWarning` if that fails, as on a full disk, and goes on."""
    ENTRIES.store(key, pickle.dumps(content, protocol=5))
