"""Runs the checks in a child process, so that a crash or a hang costs only one check.

    this process  <--one message per check--  the child, which runs the checks
        |
        `--if the child ends or is late: a new child runs the remaining checks

`python -m hetpipe.conformance.run LIMIT REFERENCE DEVICE LEVEL GROUPS FIRST` runs the checks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from hetpipe.child import Child, ChildEnded, ChildError, Parent
from hetpipe.conformance.check import CHECKS, BrokenRule, Check, Level, NotAsked
from hetpipe.errors import BackendError
from hetpipe.sdk.host import hangs
from hetpipe.sdk.host.references import backend_reference, load_reference
from hetpipe.sdk.host.registry import open_bare
from hetpipe.words import choices

if TYPE_CHECKING:
    from hetpipe.conformance.rig import Rig
    from hetpipe.sdk.info import DeviceInfo

GROUPS = (
    "contract", "buffers", "events", "memory", "threads", "queues", "chunks", "windows", "groups",
    "dtypes", "values", "strides", "lengths", "determinism", "operators", "precision", "programs",
    "training", "database",
)  # fmt: skip
"""Groups of checks in order: a fault that an earlier group finds often breaks later groups."""
CHECKED = (
    "buffers", "contract", "copies", "events", "groups", "held", "lengths", "operators", "threads",
    "training", "windows",
)  # fmt: skip
"""The modules of checks, except for torch's database."""
LIMIT_S = 300.0
"""Longest time of one check."""
GRACE_S = 60.0
"""Seconds for a process to start, and for a late process to report where it hangs."""
HANG_S = 60.0
"""A check that fails after at least this time counts as a hang."""
MOST_HANGS = 5
"""Number of hangs after which the remaining checks are skipped, to save hours."""


@dataclass(frozen=True)
class Result:
    """The outcome of a check: passed, failed, skipped, or crashed (its process ended or hung)."""

    name: str
    outcome: str
    message: str = ""
    seconds: float = 0.0
    rule: str = ""
    suspect: str = ""
    family: str = ""

    @property
    def failed(self) -> bool:
        """Whether the device has broken the rule."""
        return self.outcome in ("failed", "crashed")

    @property
    def text(self) -> str:
        """The failure with its rule and the suspected fault."""
        return f"{self.message}\n  the rule: {self.rule}\n  suspect: {self.suspect}"


def checks_of(level: Level, groups: Collection[str] = ()) -> list[Check]:
    """Return the checks of a level and of lower levels, in order; only in `groups` if given.

    Raises `BackendError` for a group that is not in `GROUPS`.
    """
    for module in CHECKED:  # each module adds its checks to CHECKS
        import_module(f"hetpipe.conformance.{module}")

    if unknown := [group for group in groups if group not in GROUPS]:
        raise BackendError(f"no group {unknown[0]!r} of checks; {choices(unknown[0], GROUPS)}")
    if level is Level.FULL:
        from hetpipe.conformance.database import add_checks

        add_checks()  # imports torch's database, which takes seconds
    asked = groups or GROUPS
    chosen = (each for each in CHECKS if each.level <= level and each.group in asked)
    return sorted(chosen, key=lambda each: (each.level, GROUPS.index(each.group)))


def rig_of(device_id: str) -> Rig:
    """Open the device under test without a companion. Raises `BackendError` if that fails."""
    from hetpipe.conformance.rig import Rig

    return Rig(open_bare(device_id))


def run_check(each: Check, rig: Rig) -> Result:
    """Run a check and return its result; only Ctrl-C and similar exceptions propagate."""
    start_s = time.perf_counter()
    outcome, message = "passed", ""
    try:
        each.function(rig)
    except NotAsked as reason:
        outcome, message = "skipped", str(reason)
    except BrokenRule as broken:
        outcome, message = "failed", str(broken)
    except Exception as error:
        outcome, message = "failed", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start_s
    return Result(each.name, outcome, message, seconds, each.rule, each.suspect, each.family)


def run_suite(
    info: DeviceInfo, level: Level, limit_s: float = LIMIT_S, groups: Collection[str] = ()
) -> Iterator[Result]:
    """Yield the result of each of `checks_of(level, groups)` as soon as the check ends.

    Raises `BackendError` for an unknown group, or if another process cannot load the backend.
    """
    reference = backend_reference(info.backend)
    if reference is None:
        raise BackendError(
            f"backend {info.backend!r} is defined in a function or at a prompt, where no other "
            "process can load it; put its class at the top of a file"
        )
    checks = checks_of(level, groups)
    first, hanging, names = 0, 0, ",".join(groups)
    while first < len(checks) and hanging < MOST_HANGS:
        arguments = (reference, info.id, int(level), names)
        for result in _results(arguments, first, checks, limit_s):
            first += 1
            hanging += result.failed and result.seconds >= min(HANG_S, limit_s)
            yield result
            if hanging == MOST_HANGS:
                break
    for each in checks[first:]:
        reason = f"not run: {hanging} checks have already hung on this device"
        yield Result(each.name, "skipped", reason, family=each.family)


def _results(
    arguments: tuple[object, ...], first: int, checks: list[Check], limit_s: float
) -> Iterator[Result]:
    """Yield the results of one child, up to the last check or the check that ends the child."""
    with Child("hetpipe.conformance.run", limit_s, *arguments, first) as child:
        for check in checks[first:]:
            try:
                message = child.receive(limit_s + GRACE_S)
            except ChildError as error:
                yield _crash(check, error, limit_s)
                return
            yield Result(**message)


def _crash(check: Check, error: ChildError, limit_s: float) -> Result:
    """Return the result of a check during which the child has ended or is late."""
    text, seconds = f"has not ended after {limit_s:g} s", limit_s
    if isinstance(error, ChildEnded):
        if place := hangs.place(error.log):
            text = f"{text}: it hangs {place}"
        else:
            last, seconds = error.last_line or "no output", 0.0
            text = f"the process ended during this check, with {error.how}: {last}"
    return Result(check.name, "crashed", text, seconds, check.rule, check.suspect, check.family)


def main(
    limit_s: float, reference: str, device_id: str, level: int, groups: Collection[str], first: int
) -> None:
    """Run the checks from number `first` on, and send a message for each result.

    The process exits during a check that takes longer than `limit_s`.
    """
    parent = Parent()
    load_reference(reference)
    rig = rig_of(device_id)
    for check in checks_of(Level(level), groups)[first:]:
        hangs.watch(limit_s, sys.stderr)
        parent.send(asdict(run_check(check, rig)))
    os._exit(0)  # skips the driver's exit handlers, which may crash


if __name__ == "__main__":
    _limit_s, _reference, _device, _level, _groups, _first = sys.argv[1:]
    _named = [group for group in _groups.split(",") if group]
    main(float(_limit_s), _reference, _device, int(_level), _named, int(_first))
