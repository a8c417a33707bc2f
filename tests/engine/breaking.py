"""Breaks a worker at a moment of its work: tests call `arm` in the worker.

A worker's moments are the beginning of each action, and the beginning and end of each command.
They are numbered from the call of `arm`.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from hetpipe.worker import service
from hetpipe.worker.copying import Copying
from hetpipe.worker.runner import Runner

KINDS = ("kill", "raise", "stop")
_moments: list[str] = []


def arm(device: Any, kind: str, number: int, note: str = "") -> None:
    """Break this worker at its moment `number`, and write the time to the file `note` before."""

    def reach(moment: str) -> None:
        _moments.append(moment)
        if len(_moments) == number + 1:
            break_now(kind, note)

    _moments.clear()
    run = Runner.run

    def watched_run(self: Any, *args: Any) -> Any:
        self._doing = _Doing(reach)
        return run(self, *args)

    Runner.run = watched_run  # type: ignore[method-assign]
    commands = service._COMMANDS
    for message, obey in [*commands.items()]:
        if message.__name__ != "Call":
            commands[message] = _watched(obey, message.__name__.lower(), reach)
    Copying.copy = _watched(Copying.copy, "copy", reach)  # type: ignore[method-assign]


def moments(device: Any) -> list[str]:
    """Return the moments of this worker since `arm`: `2F0`, or `load` and later `/load`."""
    return [*_moments]


def _watched(work: Callable[..., Any], name: str, reach: Callable[[str], None]) -> Any:
    @wraps(work)
    def watched(*args: Any) -> Any:
        reach(name)
        result = work(*args)
        reach(f"/{name}")
        return result

    return watched


class _Doing(dict[int, Any]):
    """The present actions of a worker's lanes."""

    def __init__(self, reach: Callable[[str], None]) -> None:
        super().__init__()
        self._reach = reach

    def __setitem__(self, lane: int, action: Any) -> None:
        super().__setitem__(lane, action)
        self._reach(str(action))


def break_now(kind: str, note: str = "") -> None:
    """Break this worker."""
    if note:
        Path(note).write_text(str(time.monotonic()))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "raise":
        raise RuntimeError("the device has fallen off the bus")
    elif kind == "cut":
        subprocess.run(os.environ["HETPIPE_TEST_CUT"].split(), check=True)


def sever(device: Any) -> None:
    """End the connections of this worker to workers of other hosts."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family == socket.AF_INET:
                found.shutdown(socket.SHUT_RDWR)
