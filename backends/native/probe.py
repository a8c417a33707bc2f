"""Asks a library for its devices in a child process, which may crash or hang without harm."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hetpipe.child import Child, ChildEnded, ChildLate, Parent
from hetpipe.environment import seconds
from hetpipe.errors import BackendError

from .library import Library, interface, text_of

LIMIT = "HETPIPE_NATIVE_LIMIT_S"
"""Environment variable: seconds within which a library must load and describe its devices."""
LIMIT_S = 10.0
MOST_DEVICES = 256
TEXTS = ("device", "name", "vendor", "driver", "kind", "memory_domain")
NUMBERS = ("memory_nbytes", "dtypes", "cast_dtypes", "queues", "flags")


@dataclass(frozen=True)
class Answer:
    """A library's name and the `hetpipe_device_info` fields of its devices, or an error."""

    name: str = ""
    devices: tuple[dict[str, Any], ...] = ()
    error: str = ""


def ask(paths: Iterable[Path]) -> dict[Path, Answer]:
    """Ask libraries at the same time, each in a separate child, and return their answers."""
    limit_s = seconds(LIMIT, LIMIT_S, BackendError)
    with ExitStack() as stack:
        children = {path: stack.enter_context(Child(__name__, path)) for path in paths}
        end_s = time.monotonic() + limit_s
        return {path: _answer(path, child, limit_s, end_s) for path, child in children.items()}


def _answer(path: Path, child: Child, limit_s: float, end_s: float) -> Answer:
    """Receive {"doing": STEP} before each step of the child, then the answer; return the answer."""
    doing = "its process started"
    try:
        while "doing" in (message := child.receive(max(end_s - time.monotonic(), 0.0))):
            doing = message["doing"]
    except ChildLate:
        return Answer(error=f"{path} gives no answer within {limit_s:g} s, while {doing}")
    except ChildEnded as error:
        said = f"; it said: {error.last_line[:200]}" if error.last_line else ""
        return Answer(error=f"{path} crashes with {error.how} while {doing}{said}")
    return Answer(message["name"], tuple(message["devices"]), message["error"])


def main(path: Path) -> None:
    """Ask the library. Send the name of each step before it begins, and the answer at the end."""
    parent = Parent()
    try:
        interface()  # read the header before the library can do harm
        name, devices = _describe(path, lambda doing: parent.send({"doing": doing}))
        parent.send({"name": name, "devices": devices, "error": ""})
    except BackendError as error:
        parent.send({"name": "", "devices": [], "error": str(error)})
    os._exit(0)  # skips the library's exit handlers


def _describe(path: Path, say: Callable[[str], None]) -> tuple[str, list[dict[str, Any]]]:
    say("it is loaded")
    library = Library(path)
    ffi = interface()
    say("its devices are counted")
    count = ffi.new("uint32_t *")
    library.call(f"{path}: its devices cannot be counted", "count", count)
    if count[0] > MOST_DEVICES:
        raise BackendError(
            f"{path} has {count[0]} devices; a library may have at most {MOST_DEVICES}"
        )
    devices = []
    for index in range(count[0]):
        say(f"device {index} is described")
        info = ffi.new("hetpipe_device_info *")
        library.call(f"{path}: device {index} cannot be described", "describe", index, info)
        field = partial(getattr, info)
        texts = {name: text_of(field(name)) for name in TEXTS}
        devices.append({**texts, **{name: int(field(name)) for name in NUMBERS}})
    return library.name, devices


if __name__ == "__main__":
    main(Path(sys.argv[1]))
