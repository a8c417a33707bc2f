"""Entries of a cache: bytes under a key, which serve again while nothing has changed.

Each is a file of its own, with a checksum before the content. A reader sees all of it or nothing.
Damaged entries are made again; files of other users are not read.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetpipe.caches import CacheWarning, cache_folder
from hetpipe.errors import HetpipeError
from hetpipe.files import write_beside

CHECKSUM_NBYTES = hashlib.sha256().digest_size


def key_of(*parts: object) -> str:
    """The name of an entry: a hash of everything on which its content depends."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True)
class Entries:
    """The entries of one kind, in a folder of the user's caches: at most `most`, then the oldest
    tenth goes. `variable` of the environment may name another place for the caches."""

    kind: str
    suffix: str
    most: int
    variable: str = ""

    def load(self, key: str) -> bytes | None:
        """The content of an entry; None if there is none. Warns with `CacheWarning` if it is
        damaged, or belongs to another user."""
        try:
            with self._path(key).open("rb") as file:
                if os.name == "posix" and (owner := os.fstat(file.fileno()).st_uid) != os.getuid():
                    raise ValueError(f"it belongs to user {owner}")
                checksum, content = file.read(CHECKSUM_NBYTES), file.read()
            if hashlib.sha256(content).digest() != checksum:
                raise ValueError("its checksum does not match its content")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.refuse(key, error)
            return None
        return content

    def refuse(self, key: str, reason: object) -> None:
        """Warn that an entry is of no use."""
        text = f"cache entry {self._path(key)} is not used and will be made again: {reason}"
        warnings.warn(text, CacheWarning, stacklevel=3)

    def store(self, key: str, content: bytes) -> None:
        """Store an entry. Warns with `CacheWarning` if that fails, as on a full disk, and goes
        on."""
        path = self._path(key)
        checksum = hashlib.sha256(content).digest()
        try:
            write_beside(path, lambda beside: beside.write_bytes(checksum + content))
        except HetpipeError as error:
            warnings.warn(str(error), CacheWarning, stacklevel=2)
            return
        self._prune(path.parent)

    def _path(self, key: str) -> Path:
        return cache_folder(self.kind, self.variable) / f"{key}.{self.suffix}"

    def _prune(self, folder: Path) -> None:
        """Delete the oldest entries where there are too many."""
        suffix = f".{self.suffix}"
        names = [name for name in os.listdir(folder) if name.endswith(suffix)]
        if len(names) > self.most:
            entries = sorted((folder / name for name in names), key=_age_s)
            for path in entries[: len(entries) - (self.most - self.most // 10)]:
                with suppress(OSError):  # another process deletes it, or it is not ours
                    path.unlink()


def _age_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has deleted it
        return 0.0
