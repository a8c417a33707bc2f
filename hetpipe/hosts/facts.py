"""Facts about this host that others need: its machine, processor and versions."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True)
class Facts:
    """A host: an environment that offers devices. Two hosts may share one `machine`."""

    name: str
    machine: str
    processor: str
    cores: int
    hetpipe: str
    python: str
    torch: str
    numpy: str


@cache
def own_facts(name: str = "") -> Facts:
    """Return the facts of this host; by default its name is the first part of the system's name."""
    return Facts(
        name or socket.gethostname().partition(".")[0] or "host",
        machine_id(),
        _processor(),
        len(os.sched_getaffinity(0)),
        _version("hetpipe"),
        platform.python_version(),
        _version("torch"),
        _version("numpy"),
    )


@cache
def machine_id() -> str:
    """Return an id that all environments of one machine share until it boots again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
