"""Entries of a cache: bytes under a key, which are valid until something in the key changes.

Each entry is a file with a checksum before the content. A reader sees the whole entry or nothing.
Damaged entries are made again. An entry may become code, so it is read only if no other user can
have written it: file and folder are checked after they are opened, and links of other users are
not followed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetpipe.caches import CacheWarning, optional_folder, why_not_own
from hetpipe.errors import HetpipeError
from hetpipe.files import write_beside

CHECKSUM_NBYTES = hashlib.sha256().digest_size
FORM = 2
"""Version of the format. It is part of every key, so entries of other versions are not found."""


def key_of(*parts: object) -> str:
    """Return the name of an entry: a hash of everything on which its content depends."""
    return hashlib.sha256(repr((FORM, parts)).encode()).hexdigest()


@dataclass(frozen=True)
class Entries:
    """The entries of one kind, in a folder of the user's caches.

    With more than `most` entries, `store` deletes the oldest ones and keeps nine tenths of `most`.
    `suffix` ends the file names.
    """

    kind: str
    suffix: str
    most: int

    def load(self, key: str) -> bytes | None:
        """Return the content of an entry; None if it is missing or unusable.

        Warns with `CacheWarning` if the entry is damaged, or another user may have written it.
        """
        folder = self._folder()
        if folder is None:
            return None
        try:
            data = read_own(folder, self._name(key))
            checksum, content = data[:CHECKSUM_NBYTES], data[CHECKSUM_NBYTES:]
            if _checksum(key, content) != checksum:
                raise ValueError("its checksum does not match its content")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.refuse(key, error)
            return None
        return content

    def refuse(self, key: str, reason: object) -> None:
        """Warn that an entry is unusable."""
        path = Path(self._folder() or "", self._name(key))
        text = f"cache entry {path} is not used and will be made again: {reason}"
        warnings.warn(text, CacheWarning, stacklevel=3)

    def store(self, key: str, content: bytes) -> None:
        """Store an entry. Warns with `CacheWarning` if it cannot be written, as on a full disk."""
        folder = self._folder()
        if folder is None:
            return
        try:
            write_beside(folder / self._name(key), _checksum(key, content) + content, mode=0o600)
        except HetpipeError as error:
            warnings.warn(str(error), CacheWarning, stacklevel=2)
            return
        self._prune(folder)

    def _folder(self) -> Path | None:
        return optional_folder(self.kind)

    def _name(self, key: str) -> str:
        return f"{key}.{self.suffix}"

    def _prune(self, folder: Path) -> None:
        suffix = f".{self.suffix}"
        names = [name for name in os.listdir(folder) if name.endswith(suffix)]
        if len(names) > self.most:
            entries = sorted((folder / name for name in names), key=_age_s)
            for path in entries[: len(entries) - (self.most - self.most // 10)]:
                with suppress(OSError):  # another process deletes the file, or another user owns it
                    path.unlink()


def read_own(folder: Path, name: str) -> bytes:
    """Read a file that only this user can have written. Raises `OSError` or `ValueError`."""
    if os.name != "posix":
        return (folder / name).read_bytes()
    # `cache_folder` has checked that a link on the way to the folder belongs to the user.
    inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if reason := why_not_own(os.fstat(inside)):
            raise ValueError(f"its folder {reason}")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(name, flags, dir_fd=inside), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no regular file")
            if reason := why_not_own(status):
                raise ValueError(f"it {reason}")
            return file.read()
    finally:
        os.close(inside)


def _checksum(key: str, content: bytes) -> bytes:
    """Return the checksum of key and content, so that an entry is valid only under its own key."""
    return hashlib.sha256(key.encode() + content).digest()


def _age_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another process has deleted it
        return 0.0
