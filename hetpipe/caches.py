"""Folders for caches: the one that HETPIPE_CACHE names, or the user's cache folder.

If that folder is unusable, a private temporary one takes its place.

The content of a cache can be computed again, so a warning is enough when a cache moves to another
folder. The content becomes code: captured programs, compiled kernels, the list of OpenCL's
runtimes. So only this user and root may write to the folder.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from hetpipe import environment
from hetpipe.errors import HetpipeError

LEAST_NBYTES = 16 << 20
"""Free bytes that a cache's folder must have: a worker's kernels take a few MiB."""
WARNED = "HETPIPE_WARNED_CACHE"
"""Environment variable with the folder of the last warning, which workers need not repeat."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

VARIABLE = "HETPIPE_CACHE"
"""Environment variable with the folder of all caches."""
KINDS = ("captures", "compiled", "costs", "inductor", "opencl", "selftests")

_usable: set[Path] = set()
"""Folders that this process found usable, and does not check again."""


class CacheWarning(UserWarning):
    """A cache, or an entry of it, is unusable and will be made again."""


def cache_folder(kind: str) -> Path:
    """Return the folder `kind` of hetpipe's caches, and make it if it is missing.

    Its parent is the path in the environment variable `VARIABLE`, or else the user's cache folder.
    For an unusable folder (see `problem_of`), return a temporary one, with a `CacheWarning`.
    Raises `HetpipeError` if the temporary folder is unusable as well.
    """
    named = environment.path(VARIABLE)
    base = _users_folder() if named is None else Path(os.path.abspath(named))
    problem = _problem_of_cache(base, kind, tighten_base=named is None)
    if not problem:
        return base / kind
    try:
        folder = temporary() / kind
    except HetpipeError as error:
        raise HetpipeError(f"{base} can hold no cache ({problem}), and {error}") from error
    if trouble := _problem_of_cache(folder.parent, kind, tighten_base=True):
        raise HetpipeError(
            f"neither {base} ({problem}) nor {folder} ({trouble}) can hold a cache; free space, or "
            "set TMPDIR to a folder that can be written"
        )
    warn_once(base, problem, folder.parent, VARIABLE)
    return folder


def _users_folder() -> Path:
    try:
        return user_cache_path("hetpipe")
    except RuntimeError:  # no home folder; older versions of platformdirs return the path below
        return Path("~/.cache/hetpipe")


def optional_folder(kind: str) -> Path | None:
    """Return `cache_folder`, or None with a `CacheWarning` if no folder can hold the cache."""
    try:
        return cache_folder(kind)
    except HetpipeError as error:
        text = f"{error}; until then nothing is kept, and each start computes everything again"
        if os.environ.get(WARNED) != "everywhere":
            os.environ[WARNED] = "everywhere"
            warnings.warn(text, CacheWarning, stacklevel=3)
        return None


def _problem_of_cache(base: Path, kind: str, tighten_base: bool) -> str:
    """Give the folders below `base` mode 0700, then return `problem_of(base / kind)`.

    With `tighten_base`, `base` itself gets this mode as well.
    """
    folder = base / kind
    if folder in _usable:
        return ""
    if not folder.is_absolute():
        return "this user has no home folder and no entry in the system's list of users"
    ours = [path for path in (*folder.parents, folder) if path.is_relative_to(base)]
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in sorted(ours)[0 if tighten_base else 1 :]:
            path.mkdir(mode=0o700, exist_ok=True)
            _tighten(path)
    except (OSError, ValueError) as error:
        return _reason(error)
    problem = problem_of(folder)
    if not problem:
        _usable.add(folder)
    return problem


def _tighten(folder: Path) -> None:
    """Deny other users access to a folder of this user: older versions of hetpipe allowed it."""
    if os.name != "posix":
        return
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode) and status.st_uid != os.getuid():
        raise ValueError(f"{folder} is a link of user {status.st_uid}")
    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and status.st_mode & 0o077:
        folder.chmod(0o700)


@dataclass(frozen=True)
class Cache:
    """A folder of one cache. A cache has several folders if `VARIABLE` has changed."""

    name: str
    folder: Path

    def files(self) -> Iterator[Path]:
        """Yield the files below the folder, without following links to folders."""
        for folder, _, names in os.walk(self.folder):
            yield from (Path(folder, name) for name in names)

    def sizes_nbytes(self) -> list[int]:
        """Return the size of each file. Another process may delete files meanwhile."""
        sizes = []
        for path in self.files():
            with suppress(FileNotFoundError):
                sizes.append(path.lstat().st_size)
        return sizes

    def clear(self) -> None:
        """Delete the files, and keep the folders, which other processes may use."""
        for path in self.files():
            path.unlink(missing_ok=True)


def present_caches() -> list[Cache]:
    """Return the caches in the folder that `VARIABLE` names, in the user's folder and in the
    temporary one."""
    named = environment.path(VARIABLE)
    found = [] if named is None else [Path(os.path.abspath(named)) / kind for kind in KINDS]
    for base in (_users_folder(), temporary()):
        found += sorted(base.iterdir()) if base.is_dir() else []
    kept = (path for path in dict.fromkeys(found) if path.is_dir() and not path.is_symlink())
    passing = tempfile.gettempprefix()
    return [Cache(path.name, path) for path in kept if not path.name.startswith(passing)]


def problem_of(folder: Path) -> str:
    """Return why this folder cannot hold a cache, or "" if it can. Make a missing folder.

    A folder is unusable if it cannot be written, if other users can write to it, or if its disk
    is nearly full (`LEAST_NBYTES`).
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := _open_to_others(folder):
            return reason
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
        free_nbytes = shutil.disk_usage(folder).free
    except (OSError, ValueError) as error:
        return _reason(error)
    if free_nbytes < LEAST_NBYTES:
        return f"{free_nbytes >> 20} MiB are free, {LEAST_NBYTES >> 20} MiB are needed"
    return ""


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _open_to_others(folder: Path) -> str:
    """Return why others could change the content of `folder`, or "" if they cannot.

    `folder` must belong to this user, and every folder above it to this user or root. Others may
    write to none of these folders, except where the sticky bit protects names, as in /tmp.
    """
    if os.name != "posix":
        return ""
    user = os.getuid()
    trusted = {user, 0, os.lstat("/").st_uid}  # in a container, root may have another number
    if refusal := why_not_own(folder.stat()):
        return f"{folder} {refusal}"
    plain, real = Path(os.path.abspath(folder)), Path(os.path.realpath(folder))
    for path in dict.fromkeys((*plain.parents, *real.parents, plain, real)):
        status = path.lstat()
        if status.st_uid not in trusted:
            return f"{path} belongs to user {status.st_uid}"
        is_folder, is_sticky = stat.S_ISDIR(status.st_mode), status.st_mode & stat.S_ISVTX
        if is_folder and status.st_mode & OTHERS_WRITE and not is_sticky:
            return f"others can write to {path}; chmod go-w {path}"
    return ""


def why_not_own(status: os.stat_result) -> str:
    """Return why a user other than this one may have written a file or folder, or ""."""
    if os.name != "posix":
        return ""
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}, not to {os.getuid()}"
    if status.st_mode & OTHERS_WRITE:
        return f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def warn_once(folder: Path, problem: str, instead: Path, variable: str) -> None:
    """Warn that a cache is in the folder `instead`, unless this process or its parent has warned.

    The user can name another folder in the environment variable `variable`.
    """
    if os.environ.get(WARNED) == str(folder):
        return
    os.environ[WARNED] = str(folder)
    warnings.warn(
        f"no cache can be kept in {folder} ({problem}): hetpipe uses {instead}, which may be gone "
        f"after a restart of the machine; make {folder} writable, for you alone, with at least "
        f"{LEAST_NBYTES >> 20} MiB free, or set {variable} to another folder",
        CacheWarning,
        stacklevel=3,
    )


@cache
def temporary() -> Path:
    """Return the folder for temporary files of this user, to which other users have no access."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
    try:
        folder = Path(tempfile.gettempdir()) / f"hetpipe-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if os.name == "posix" and (
            not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o077
        ):
            return Path(tempfile.mkdtemp(prefix="hetpipe-"))  # other users have access to it
    except OSError as error:
        raise HetpipeError(
            f"no folder for temporary files can be written ({error}); set TMPDIR to a folder that "
            "can be written"
        ) from error
    return folder
