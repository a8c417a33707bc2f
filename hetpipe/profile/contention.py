"""Contention: the share of the cores that other processes used during a profile.

Costs that are measured while other work runs are too high, by a factor that differs between
devices. A cost table records the share of that work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetpipe.hosts.facts import machine_id

LIMIT = 0.1  # share of the cores' time; a desktop at rest stays below a few hundredths
STAT = Path("/proc/stat")


class ContentionWarning(UserWarning):
    """Costs were measured while other work ran, so predictions from them are unreliable."""


@dataclass(frozen=True)
class Usage:
    """Seconds of computation so far: by a process, and on each core that the process may use."""

    machine: str
    process: str
    at_s: float
    own_s: float
    cores_s: dict[int, float]


def usage(_device: object = None) -> Usage:
    """Return the usage of this process. `cores_s` is empty if the system does not report it."""
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    return Usage(machine_id(), _process(), time.monotonic(), own_s, _busy_s())


def foreign_share(before: Sequence[Usage], after: Sequence[Usage]) -> float:
    """Return the share of the cores' time that other processes used between two usages, 0 or more.

    A hypervisor's time counts as well. The share is 0 if no system reports the cores' times.
    """
    busy_s, own_s, elapsed_s = {}, {}, {}
    for start, end in zip(before, after, strict=True):
        if not (start.cores_s and end.cores_s):
            continue
        own_s[end.machine, end.process] = end.own_s - start.own_s
        for core in start.cores_s.keys() & end.cores_s.keys():
            busy_s[end.machine, core] = end.cores_s[core] - start.cores_s[core]
            elapsed_s[end.machine, core] = end.at_s - start.at_s
    whole_s = sum(elapsed_s.values())
    return max(0.0, sum(busy_s.values()) - sum(own_s.values())) / whole_s if whole_s > 0 else 0.0


def mark(share: float) -> float:
    """Return the share of other work as a table records it: 0 if it is at most `LIMIT`."""
    return min(share, 1.0) if share > LIMIT else 0.0


def _process() -> str:
    """Return a name of this process that is unique on the machine, also beside containers."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return f"{space}:{os.getpid()}"


def _busy_s() -> dict[int, float]:
    """Return, by core, the seconds of all work, including a hypervisor's."""
    try:
        lines = STAT.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    allowed = os.sched_getaffinity(0)
    ticks = os.sysconf("SC_CLK_TCK")
    busy_s = {}
    for line in lines:
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in allowed:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            busy_s[int(name[3:])] = (user + nice + system + irq + softirq + steal) / ticks
    return busy_s
