"""Started crews that tests share, because a start takes as long as many tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import WorkerError

ALIKE = ("numpy:cpu:0",) * 4
UNLIKE = ("numpy:cpu:0", "pytorch:cpu:0") * 3
MIXED = ("pytorch:cpu:0", "numpy:cpu:0", "pytorch:cpu:0")
TRANSPORTS = ("local", "shared-memory", "distributed")


class Crews:
    """Started crews by devices and transport; a crew serves many pipelines, one after another."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._crews: dict[tuple[tuple[str, ...], str], Crew] = {}

    def __call__(self, devices: Sequence[str], transport: str = "local") -> Crew:
        """Return a started crew whose members m0, m1, ... run on these devices.

        The latest `most` crews stay started. A broken crew is replaced.
        """
        key = tuple(devices), transport
        crew = self._crews.pop(key, None)
        if crew is not None and not serves(crew):
            crew.close()
            crew = None
        while crew is None and len(self._crews) >= self._most:
            self._crews.pop(next(iter(self._crews))).close()
        if crew is None:
            members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
            crew = Crew.start(Cluster(members, transport=transport))
        self._crews[key] = crew
        return crew

    def close(self) -> None:
        """End all crews."""
        while self._crews:
            self._crews.popitem()[1].close()


def serves(crew: Crew) -> bool:
    """Return whether all workers answer and no step is under way."""
    try:
        crew.call(list(crew.infos), "builtins:id")
    except WorkerError:
        return False
    return not crew.under_way


def has_ended(process: int) -> bool:
    """Return whether a process has ended, although its parent may not know yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(condition: Callable[[], bool], limit_s: float = 5.0) -> bool:
    """Wait until a condition is true; return whether it became true in time."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
