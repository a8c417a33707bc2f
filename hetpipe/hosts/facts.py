"""Facts about this host that others need: its machine, processor and versions."""

from __future__ import annotations

import os
import platform
import re
import socket
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hetpipe.errors import ClusterError
from hetpipe.words import short

T = TypeVar("T")
_NAME = re.compile(r"[\w.-]{1,64}")
MOST_LETTERS = 256


@dataclass(frozen=True)
class Facts:
    """A host: an environment that offers devices. Two hosts may share one `machine`, and its
    `memory` if their processes can open each other's shared memory."""

    name: str
    machine: str
    memory: str
    processor: str
    cores: int
    hetpipe: str
    python: str
    torch: str
    numpy: str

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        return (
            f"host {self.name}: {self.processor}, {cores}; hetpipe {self.hetpipe}, Python "
            f"{self.python}, torch {self.torch}, numpy {self.numpy}"
        )


@cache
def own_facts(name: str = "") -> Facts:
    """Return the facts of this host; by default its name is the first part of the system's name.

    Raises `ClusterError` for a name that no host can have.
    """
    name = name or re.sub(r"[^\w-]", "-", socket.gethostname().partition(".")[0])[:64] or "host"
    if problem := problem_of_name(name):
        raise ClusterError(f"{problem}; give this host another name")
    return Facts(
        name,
        machine_id(),
        memory_id(),
        _processor(),
        len(os.sched_getaffinity(0)),
        _version("hetpipe"),
        platform.python_version(),
        _version("torch"),
        _version("numpy"),
    )


def problem_of_name(name: str) -> str:
    """Return why no host can have this name, or ""."""
    if _NAME.fullmatch(name):
        return ""
    return f"{short(name)} is no name of a host: use up to 64 letters, digits, '.', '-' and '_'"


def parse_record(kind: type[T], value: Any) -> T:
    """Return a dataclass of short texts and of numbers, from JSON. Raises `ValueError`."""
    kinds = get_type_hints(kind)
    if not isinstance(value, dict) or value.keys() != kinds.keys():
        raise ValueError(f"{short(value)} is no {kind.__name__}")
    for name, expected in kinds.items():
        found = value[name]
        if type(found) is not expected or (isinstance(found, str) and not _is_plain(found)):
            raise ValueError(f"{short(found)} is no {name} of {kind.__name__}")
    return kind(**value)


def _is_plain(text: str) -> bool:
    return len(text) <= MOST_LETTERS and text.isprintable()


@cache
def machine_id() -> str:
    """Return an id that all environments of one machine share until it boots again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


@cache
def memory_id() -> str:
    """Return an id of the processes that can open each other's shared memory, or "" if unknown.

    They belong to one user and see each other's processes. They also have one network and one
    clock, so that a network namespace is never bypassed, and messages need no other clock.
    """
    try:
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid", "time", "user")]
    except OSError:
        return ""
    return " ".join((machine_id(), str(os.geteuid()), *spaces))


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
