"""Breaks a worker at an action: tests call `arm` in the worker."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from typing import Any

from hetpipe.worker.runner import Runner

KINDS = ("kill", "raise", "stop")


def arm(device: Any, kind: str, number: int) -> None:
    """Break this worker before its action `number`, counted from now on."""
    begin = Runner.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self._doing = _Doing(kind, number)

    Runner.__init__ = init  # type: ignore[method-assign]


class _Doing(dict[int, Any]):
    """The present actions of a worker's lanes."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self._kind, self._left = kind, number

    def __setitem__(self, lane: int, action: Any) -> None:
        super().__setitem__(lane, action)
        if self._left == 0:
            break_now(self._kind)
        self._left -= 1


def break_now(kind: str) -> None:
    """Break this worker."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        raise RuntimeError("the device has fallen off the bus")


def sever(device: Any) -> None:
    """End the connections of this worker to workers of other hosts."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family == socket.AF_INET:
                found.shutdown(socket.SHUT_RDWR)
