"""Writes files and folders so that they are on the disk when a call returns."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NEW = (
    os.O_WRONLY | os.O_CREAT | os.O_EXCL
    | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
)  # fmt: skip


def write(path: Path, parts: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Write a file; return its size and SHA-256. Only `sync` writes the folder's entry."""
    digest, nbytes = hashlib.sha256(), 0
    with suppress(FileNotFoundError):
        os.unlink(path)
    with open(os.open(path, _NEW, 0o666), "wb") as file:
        for part in parts:
            digest.update(part)
            nbytes += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return nbytes, digest.hexdigest()


def sync(directory: Path) -> None:
    """Write the folder's entries (the names of its files) to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the folder inside the block, against other processes and threads of this machine.

    The lock ends with the block or with the process; forks of the process do not have it. Raises
    `BlockingIOError` if the folder is already locked. Warns if the file system has no locks.
    """
    import fcntl

    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    _locked.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            text = f"{directory} cannot be locked ({error.strerror}); save there from one process"
            warnings.warn(text, stacklevel=4)
        yield
    finally:
        if descriptor in _locked:  # otherwise this is a fork
            _locked.remove(descriptor)
            os.close(descriptor)


_locked: set[int] = set()  # the descriptors of locked folders


def _release() -> None:
    while _locked:
        os.close(_locked.pop())


os.register_at_fork(after_in_child=_release)


@contextmanager
def made(directory: Path) -> Iterator[None]:
    """Make a folder and its parents, unless they exist. After an error in the block, remove the new
    folders, if they are empty."""
    new = [each for each in (directory, *directory.parents) if not os.path.lexists(each)]
    try:
        _make(directory)
        yield
    except BaseException:
        for folder in new:
            with suppress(OSError):  # it has files
                folder.rmdir()
        raise


def _make(directory: Path) -> None:
    if not directory.is_dir():
        _make(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)
