"""Ends a process whose device hangs, and names the function in which it hangs."""

from __future__ import annotations

import faulthandler
import re
from pathlib import Path
from typing import TextIO

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (\S+)')
_WAITS = ("threading.py", "queue.py")
_PACKAGE = Path(__file__).parents[2]


def watch(limit_s: float, log: TextIO) -> None:
    """End this process `limit_s` after the last `watch` call, with its threads' stacks in `log`."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=log)


def place(log: str) -> str | None:
    """Return the function that hung, in words; None if `watch` has not ended the process.

    The function is a backend's. hetpipe called it in the main thread, or in a thread for which the
    main thread waits.
    """
    if "Timeout (" not in log:
        return None
    threads = [_FRAME.findall(stack) for stack in log.split("Thread 0x")[1:]]
    for frames in reversed(threads):  # the main thread is last; the innermost call is first
        called = 0
        while called < len(frames) and not _is_core(Path(frames[called][0])):
            called += 1
        if 0 < called < len(frames) and Path(frames[called - 1][0]).name not in _WAITS:
            file, line, function = frames[called - 1]
            return f"in {function} ({file}:{line})"
    return "at an unknown place"


def _is_core(file: Path) -> bool:
    """Return whether a file belongs to hetpipe, and not to one of its backends."""
    return file.is_relative_to(_PACKAGE) and not file.is_relative_to(_PACKAGE / "backends")
