"""The cache of measurements on disk, valid while nothing that they depend on has changed.

It has one JSON file per key, in the user's cache folder or in $HETPIPE_CACHE.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetpipe.caches import CacheWarning, cache_folder, optional_folder
from hetpipe.entries import read_own
from hetpipe.errors import HetpipeError
from hetpipe.files import write_beside

ENVIRONMENT = "HETPIPE_CACHE"


def folder() -> Path:
    """Return the folder of the entries. Issues a `CacheWarning` if it is not the usual one."""
    return cache_folder("costs", ENVIRONMENT)


def key(parts: Mapping[str, Any]) -> str:
    """Return the name of an entry: a hash of `parts`, on which its content depends.

    A profile's parts are the model's fingerprint, the devices' infos with their drivers, the
    samples of a micro-batch, the cores, and the versions of the software. `parts` is hashed as
    JSON, so the order of its keys does not matter; a value without a JSON form (an enum) counts by
    its text.
    """
    return _digest(json.dumps(parts, sort_keys=True, default=str))


def load(entry: str) -> dict[str, Any] | None:
    """Return the content stored under a key; None if there is none.

    Issues a `CacheWarning`, and returns None, if the file is damaged or may be another user's.
    """
    there = optional_folder("costs", ENVIRONMENT)
    if there is None:
        return None
    path = there / f"{entry}.json"
    try:
        document = json.loads(read_own(there, path.name))
        content: dict[str, Any] = document["content"]
        if document["checksum"] != _checksum(content):
            raise ValueError("its checksum does not match its content")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        text = f"cache entry {path} is not used and will be made again: {error}"
        warnings.warn(text, CacheWarning, stacklevel=2)
        return None
    return content


def store(entry: str, content: Mapping[str, Any]) -> None:
    """Store a JSON-able dict; readers see the old entry or the new one, never a part.

    Issues a `CacheWarning`, and returns, if the store fails, as on a full disk.
    """
    there = optional_folder("costs", ENVIRONMENT)
    if there is None:
        return
    document = json.dumps({"checksum": _checksum(content), "content": content})
    try:
        write_beside(there / f"{entry}.json", document, mode=0o600)
    except HetpipeError as error:
        warnings.warn(str(error), CacheWarning, stacklevel=2)


def _checksum(content: Mapping[str, Any]) -> str:
    return _digest(json.dumps(content, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
