"""Reads files that people name, and writes files so that readers see a whole file or none."""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from hetpipe.errors import HetpipeError

MOST_NBYTES = 64 << 20
"""Bytes of the largest file that is read, unless the caller sets another limit."""

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_OLD = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # a FIFO without a writer does not block
_PLAIN = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


def user_path(
    path: str | os.PathLike[str], kind_of_error: type[HetpipeError] = HetpipeError
) -> Path:
    """Return the path that a user gave, with `~` and `~name` replaced by the home folder.

    Raises `kind_of_error` for an unknown home folder, and for a path that no file can have.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise kind_of_error(f"no file can have the path {text!r}; give another path")
    expanded = os.path.expanduser(text)
    first = text.replace(os.sep, "/").partition("/")[0]
    if first.startswith("~") and expanded == text and not os.path.lexists(first):
        raise kind_of_error(
            f"{text}: the home folder {first} is unknown; write the path in full, or ./{text} for "
            "a file whose name begins with ~"
        )
    return Path(expanded)


def path_in(folder: Path, text: str, kind_of_error: type[HetpipeError] = HetpipeError) -> Path:
    """Return the path that a file in `folder` gives; a relative path begins at `folder`.

    Raises `kind_of_error` like `user_path`.
    """
    return folder / user_path(text, kind_of_error)


def open_regular(path: Path, most_nbytes: int | None = MOST_NBYTES) -> BinaryIO:
    """Open a regular file of at most `most_nbytes` to read it.

    Raises `OSError` otherwise: a FIFO would block, and a device never ends.
    """
    try:
        descriptor = os.open(path, _OLD | _PLAIN)
    except ValueError as error:  # a zero byte in the path
        raise OSError(str(error)) from error
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise OSError("it is a folder; give a file")
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is a pipe or a device; give a regular file")
        if most_nbytes is not None and status.st_size > most_nbytes:
            raise OSError(f"it has {status.st_size} bytes; at most {most_nbytes} are read")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, most_nbytes: int | None = MOST_NBYTES) -> bytes:
    """Read a regular file. Raises `OSError` like `open_regular`."""
    with open_regular(path, most_nbytes) as file:
        return file.read()


def write_beside(
    path: Path, write: bytes | str | Callable[[BinaryIO], object], mode: int = 0o666
) -> None:
    """Write a new file beside `path`, then rename it to `path`. Make a missing folder.

    `write` is the content, or a function that writes the content to an open file. The umask applies
    to `mode`. The new file's name is unique, so several threads and processes may write to `path`.
    A failure leaves no new file behind. Raises `HetpipeError` if the file cannot be written.
    """
    path = user_path(path)
    beside = path.parent / f".{secrets.token_hex(8)}.partial"
    created = False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(beside, _NEW | _PLAIN, mode)
        created = True
        with os.fdopen(descriptor, "wb") as file:
            if callable(write):
                write(file)
            else:
                file.write(write.encode() if isinstance(write, str) else write)
        beside.replace(path)
        created = False
    except OSError as error:
        raise HetpipeError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if created:
            with suppress(OSError):
                beside.unlink()


def check_target(path: Path | None) -> None:
    """Raise `HetpipeError` if `write_beside` could not write `path`; None is no file.

    A command calls this before its work, so that the work is not lost.
    """
    if path is None:
        return
    path = user_path(path)
    if path.is_dir():
        raise HetpipeError(f"cannot write {path}: it is a folder; give a file")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        reason = f"{above} is no folder"
    elif not os.access(above, os.W_OK | os.X_OK):
        reason = f"the folder {above} cannot be written"
    else:
        return
    raise HetpipeError(f"cannot write {path}: {reason}")


def dump_json(data: Any) -> str:
    """Return `data` as JSON with a final newline. Infinite numbers and NaN become null."""
    return json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON to `path`. Raises `HetpipeError` like `write_beside`."""
    write_beside(path, dump_json(data))


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
