"""Starts modules of hetpipe in new processes, with the import path of this process."""

from __future__ import annotations

import errno
import os
import resource
import signal
import site
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

START = Path(__file__).with_name("start.py")
PARENT = "HETPIPE_PARENT"
"""Environment variable: id of the parent process; the new process ends with it."""
LOOK_S = 0.25
"""Seconds between two looks at the state of a process."""
STOPPED_LOOKS = 5
"""Successive looks that find a process stopped until it counts as stopped: somebody may stop a
process for a moment. Time in which the looking process is stopped as well does not count."""
_PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: object) -> list[str]:
    """Return a command like `python -m MODULE ARGUMENTS...`.

    With this command, files of the current folder cannot replace Python's modules. Start it with
    the variables that `environment` returns.
    """
    return [sys.executable, str(START), module, *map(str, arguments)]


def environment(settings: Mapping[str, str] = {}) -> dict[str, str]:
    """Return this process's variables, `settings`, and the import path for `command`.

    PYTHONPATH would put its folders first, so it has another name until `start.py` has run.
    """
    variables = {**os.environ, **settings, "HETPIPE_PATH": "\n".join(ordered(sys.path))}
    if "PYTHONPATH" in variables:
        variables["HETPIPE_PYTHONPATH"] = variables.pop("PYTHONPATH")
    return variables


def end_with(parent: int | None) -> None:
    """Let the system end this process when the thread that started it ends.

    `parent` is the process of that thread; with None, nothing ends this process.
    """
    import ctypes  # here, because the import takes 10 ms and most processes do not need it

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0 if parent is None else signal.SIGTERM)
    if parent not in (None, os.getppid()):
        os._exit(1)


def thread_states(pid: int) -> str:
    """Return the states of a process's threads, as letters of the system (`man proc`); "" if the
    process has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return ""
    return "".join(_state(pid, thread) for thread in threads)


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process; False if it has ended or a debugger holds it.

    A signal stops all threads, so a look at the first one is enough.
    """
    return _state(pid, pid) == "T"


def _state(pid: int, thread: int | str) -> str:
    """Return the state of a thread; "" if it has ended."""
    try:
        file = os.open(f"/proc/{pid}/task/{thread}/stat", os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(file, 256).rpartition(b") ")[2][:1].decode()  # the name may have a ")"
    except OSError:
        return ""
    finally:
        os.close(file)


def ordered(path: Sequence[str]) -> list[str]:
    """Return the import path with the folders of Python and of installed packages first.

    So a new process does not import a `queue.py` beside the user's script instead of Python's.
    """
    entries = [entry for entry in path if isinstance(entry, str)]
    return sorted(entries, key=lambda entry: not _is_library(entry))


def start_refusal(error: BaseException) -> str:
    """Return why the system refused a process or thread, and the cure; "" for another error."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return f"the system has too little memory for another process ({error}): free some"
    refused = isinstance(error, OSError) and error.errno == errno.EAGAIN
    if not refused and "can't start new thread" not in str(error):
        return ""
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        for limit in resource.getrlimit(resource.RLIMIT_NPROC)
    )
    return (
        f"the system allows no more processes or threads ({error}): the user's limit is {soft}, "
        f"which may be raised to {hard} (ulimit -u), and a container may have a lower limit "
        "(pids.max): raise the limit, or end other processes"
    )


def shadow(module: str) -> str | None:
    """Return the file that `command` imports as `module`; None if this process uses that file."""
    top = module.partition(".")[0]
    if top == "hetpipe":
        return None  # `start.py` loads its own `hetpipe`
    spec = PathFinder.find_spec(top, ordered(sys.path))
    loaded = sys.modules.get(top) or sys.modules["__main__"]  # what `python -m` runs
    if spec is None or spec.origin in (None, getattr(loaded, "__file__", None)):
        return None
    return spec.origin


def _is_library(entry: str) -> bool:
    """Return whether a folder or zip file of the import path belongs to Python or a package."""
    if not entry:
        return False  # the current folder
    folder = Path(entry).absolute()
    if any(part in ("site-packages", "dist-packages") for part in folder.parts):
        return True
    homes = [
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        *site.getsitepackages(),
    ]
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    return folder.name == zipped or any(folder.is_relative_to(home) for home in homes)
