"""The secret that all hosts of a cluster share. Whoever knows it can run code on every host."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from hetpipe.caches import temporary
from hetpipe.errors import ClusterError
from hetpipe.files import user_path

FILE = "HETPIPE_SECRET_FILE"
TEXT = "HETPIPE_SECRET"
LEAST_LENGTH = 16
"""Characters of the shortest secret. An attacker can try secrets against a recorded handshake."""

MOST_NBYTES = 64 * 1024

CURE = (
    f"write one with 'hetpipe secret FILE', copy the file to every host, and set {FILE} to its path"
)


def find_secret(*, loopback: bool) -> bytes:
    """Return the secret that the environment names.

    On the `loopback` interface a secret of this user's processes replaces a missing one. Raises
    `ClusterError` if there is no secret, or if it is short or can be read by other users.
    """
    if path := os.environ.get(FILE, ""):
        return _checked(_read(user_path(path, ClusterError)), path)
    if text := os.environ.get(TEXT, ""):
        return _checked(text.encode(errors="surrogateescape"), TEXT)
    if not loopback:
        raise ClusterError(f"hosts need a shared secret, and this one has none: {CURE}")
    return _own_secret(temporary() / "secret")


def write_secret(path: Path) -> None:
    """Write a new secret to a file that only this user can read.

    Raises `ClusterError` if the file exists or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ClusterError(f"{path} exists already; name a new file, or delete this one") from None
    except OSError as error:
        raise ClusterError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except OSError as error:
        path.unlink()
        raise ClusterError(f"{path} cannot be written: {error.strerror}") from error


def _own_secret(path: Path) -> bytes:
    """Return the secret in a folder of this user alone, and write it if it is missing."""
    if not os.path.lexists(path):
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        write_secret(draft)
        try:
            with suppress(FileExistsError):  # another process was first
                os.link(draft, path)
        except OSError as error:
            raise ClusterError(f"{path} cannot be written: {error.strerror}") from error
        finally:
            draft.unlink()
    return _checked(_read(path), f"{path} (delete it, and hetpipe makes another)")


def _read(path: Path) -> bytes:
    """Return the text of a file that other users can neither read nor have written."""
    try:
        # A pipe or a device might never end.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ClusterError(f"the secret {path} is no file: {CURE}")
            _check_owner(path, status)
            return file.read(MOST_NBYTES).strip()
    except OSError as error:
        raise ClusterError(f"the secret {path} cannot be read: {error.strerror}; {CURE}") from error


def _check_owner(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ClusterError(
            f"other users can read the secret {path} (mode {mode:04o}): make a new one, since this "
            f"one may be known, or run chmod 600 {path}"
        )
    if status.st_uid != os.geteuid():
        raise ClusterError(
            f"the secret {path} belongs to user {status.st_uid}, and this is user {os.geteuid()}: "
            "copy it to a file of this user"
        )


def _checked(secret: bytes, place: str) -> bytes:
    if len(secret) < LEAST_LENGTH:
        raise ClusterError(
            f"the secret in {place} has {len(secret)} characters, but needs {LEAST_LENGTH}: {CURE}"
        )
    return secret
