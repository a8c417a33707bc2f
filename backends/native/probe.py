"""Asks a library for its devices in a separate process, which may crash or hang without harm."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from hetpipe import process
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
    """A library's name and the `hetpipe_device_info` fields of its devices; or an error."""

    name: str = ""
    devices: tuple[dict[str, Any], ...] = ()
    error: str = ""


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    reading: int
    said: IO[bytes]  # its standard error


def ask(paths: Iterable[Path]) -> dict[Path, Answer]:
    """Ask libraries at the same time, each in a separate process, and return their answers."""
    limit_s = seconds(LIMIT, LIMIT_S, BackendError)
    children = {path: _start(path) for path in paths}
    end_s = time.monotonic() + limit_s
    return {path: _answer(path, child, limit_s, end_s) for path, child in children.items()}


def _start(path: Path) -> _Child:
    reading, writing = os.pipe()
    said = tempfile.TemporaryFile()  # noqa: SIM115 - closed where it is read
    child = subprocess.Popen(
        process.command("hetpipe.backends.native.probe", writing, path),
        env=process.environment(),
        pass_fds=(writing,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=said,
        start_new_session=True,  # so that a kill reaches the library's child processes
    )
    os.close(writing)
    return _Child(child, reading, said)


def _answer(path: Path, child: _Child, limit_s: float, end_s: float) -> Answer:
    """Read lines of JSON: {"doing": ...} before each step, and the answer as the last line."""
    text, late = b"", False
    while True:
        if not select.select([child.reading], [], [], max(end_s - time.monotonic(), 0))[0]:
            late = True
            break
        part = os.read(child.reading, 1 << 16)
        if not part:
            break
        text += part
    os.close(child.reading)
    if child.process.poll() is None and late:
        os.killpg(child.process.pid, signal.SIGKILL)
    code = child.process.wait()
    with child.said:
        child.said.seek(0)
        said = child.said.read(1 << 16).decode(errors="replace").strip()
    lines = [json.loads(line) for line in text.splitlines() if line.endswith(b"}")]
    if lines and "doing" not in lines[-1]:
        last = lines[-1]
        return Answer(last["name"], tuple(last["devices"]), last["error"])
    doing = lines[-1]["doing"] if lines else "its process started"
    if late:
        return Answer(error=f"{path} gives no answer within {limit_s:g} s, while {doing}")
    end = f"exit status {code}" if code >= 0 else _signal_name(-code)
    last_words = f"; it said: {said.splitlines()[-1][:200]}" if said else ""
    return Answer(error=f"{path} crashes ({end}) while {doing}{last_words}")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def main(writing: int, path: Path) -> None:
    """Ask the library; write each step, then the answer, to the file descriptor `writing`."""
    with open(writing, "w", encoding="utf-8") as lines:

        def say(**fields: Any) -> None:
            lines.write(json.dumps(fields) + "\n")
            lines.flush()

        try:
            interface()  # read before the library can do harm
            name, devices = _describe(path, lambda doing: say(doing=doing))
            say(name=name, devices=devices, error="")
        except BackendError as error:
            say(name="", devices=[], error=str(error))
    os._exit(0)  # without the library's exit handlers


def _describe(path: Path, say: Callable[[str], None]) -> tuple[str, list[dict[str, Any]]]:
    say("it is loaded")
    library = Library(path)
    ffi = interface()
    say("its devices are counted")
    count = ffi.new("uint32_t *")
    library.call(f"{path}: its devices cannot be counted", "count", count)
    if count[0] > MOST_DEVICES:
        raise BackendError(f"{path} has {count[0]} devices; at most {MOST_DEVICES} are taken")
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
    main(int(sys.argv[1]), Path(sys.argv[2]))
