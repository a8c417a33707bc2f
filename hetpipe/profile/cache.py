"""The cache of measurements on disk. An entry is used until something on which it depends changes.

The cache has one JSON file per key, in the user's cache folder or in $HETPIPE_CACHE.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hetpipe.caches import CacheWarning, cache_folder, optional_folder
from hetpipe.entries import read_own
from hetpipe.errors import HetpipeError
from hetpipe.files import write_beside

_instead: Path | None = None
"""The folder within `fresh_costs`."""


def folder() -> Path:
    """Return the folder of the entries. Issues a `CacheWarning` if the usual folder is unusable."""
    return _instead or cache_folder("costs")


@contextmanager
def fresh_costs() -> Iterator[None]:
    """Use an empty cache of costs within the context, so that all costs are measured again."""
    global _instead
    before = _instead
    with TemporaryDirectory() as empty:
        _instead = Path(empty)
        try:
            yield
        finally:
            _instead = before


def key(parts: Mapping[str, Any]) -> str:
    """Return the name of an entry: a hash of `parts`, everything on which the entry depends.

    For a profile these are the model's fingerprint, the optimizer, the members with their devices'
    infos, the links and the transport, the versions of the software, and the samples of a
    micro-batch. `parts` is hashed as JSON, so the order of its keys does not matter. A value
    without a JSON form, such as an enum, is replaced by its text.
    """
    return _digest(json.dumps(parts, sort_keys=True, default=str))


def load(entry: str) -> dict[str, Any] | None:
    """Return the content stored under a key; None if there is none.

    If the file is damaged, or another user may have written it, issues a `CacheWarning` and returns
    None.
    """
    there = _instead or optional_folder("costs")
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
    """Store a dict that `json` can write; readers see the old entry or the new one, never a part.

    If that fails, for example on a full disk, issues a `CacheWarning` and returns.
    """
    there = _instead or optional_folder("costs")
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
