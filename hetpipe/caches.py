"""Folders for caches: the user's own, or a private temporary one where that cannot be used.

A cache holds what can be computed again, so it alone may lie elsewhere than asked, with a warning.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import warnings
from functools import cache
from pathlib import Path

from platformdirs import user_cache_path

from hetpipe.errors import HetpipeError

LEAST_NBYTES = 16 << 20
"""Room that a cache's folder must have: a worker's kernels take a few MiB."""
WARNED = "HETPIPE_WARNED_CACHE"
"""Variable with the folder of the last warning: this process's workers do not repeat it."""


class CacheWarning(UserWarning):
    """A cache, or an entry of it, is unusable and will be made again."""


def cache_folder(kind: str, variable: str = "") -> Path:
    """The folder `kind` of hetpipe's caches, made if it is missing.

    They lie in the user's cache folder, or in the one that `variable` of the environment names.
    Where nothing can be written the folder is a private temporary one, with a `CacheWarning`.
    """
    base = Path(os.environ.get(variable) or user_cache_path("hetpipe"))
    problem = problem_of(base / kind)
    if not problem:
        return base / kind
    folder = temporary() / kind
    if trouble := problem_of(folder):
        raise HetpipeError(
            f"neither {base} ({problem}) nor {folder} ({trouble}) can hold a cache; free space, or "
            "set TMPDIR to a folder that can be written"
        )
    warn_once(base, problem, folder.parent, variable or "XDG_CACHE_HOME")
    return folder


def problem_of(folder: Path) -> str:
    """Why a cache cannot lie in this folder, which is made if it is missing; empty if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
        free_nbytes = shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error)
    if free_nbytes < LEAST_NBYTES:
        return f"{free_nbytes >> 20} MiB are free, {LEAST_NBYTES >> 20} MiB are needed"
    return ""


def warn_once(folder: Path, problem: str, instead: Path, variable: str) -> None:
    """Say that a cache lies elsewhere, unless this process or its parent said so before."""
    if os.environ.get(WARNED) == str(folder):
        return
    os.environ[WARNED] = str(folder)
    warnings.warn(
        f"no cache can be kept in {folder} ({problem}): {instead} is used, and may be gone after a "
        f"restart of the machine; make the folder writable with at least {LEAST_NBYTES >> 20} MiB "
        f"free, or set {variable} to another one",
        CacheWarning,
        stacklevel=3,
    )


@cache
def temporary() -> Path:
    """A folder for temporary files that only this user can read or write, for all processes."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
    try:
        folder = Path(tempfile.gettempdir()) / f"hetpipe-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if os.name == "posix" and (
            not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o077
        ):
            return Path(tempfile.mkdtemp(prefix="hetpipe-"))  # someone else made that folder
    except OSError as error:
        raise HetpipeError(
            f"no folder for temporary files can be written ({error}); set TMPDIR to one"
        ) from error
    return folder
