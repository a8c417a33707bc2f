"""Run of the checks in a separate process, so that a crash or a hang costs only one check.

    this process  <--one line of JSON per check--  the process that runs the checks
        |
        `--if it dies or is silent for too long: a new process runs the checks after that one

`python -m hetpipe.conformance.run FD LIMIT REFERENCE DEVICE LEVEL GROUPS FIRST` runs the checks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from hetpipe import process
from hetpipe.conformance.check import BrokenRule, Check, Level, NotAsked
from hetpipe.errors import BackendError
from hetpipe.sdk import hangs
from hetpipe.sdk.references import backend_reference, load_reference
from hetpipe.sdk.registry import open_bare

if TYPE_CHECKING:
    from hetpipe.conformance.rig import Rig
    from hetpipe.sdk.info import DeviceInfo

GROUPS = (
    "contract", "buffers", "events", "memory", "threads", "queues", "chunks", "dtypes", "values",
    "strides", "lengths", "determinism", "operators", "precision", "programs", "training",
    "database",
)  # fmt: skip
"""The order of checks: a fault in an earlier group often shows in later groups, too."""
LIMIT_S = 300.0
"""Longest time of one check."""
GRACE_S = 60.0
"""Seconds for a process to start, and for a late process to report where it hangs."""
HANG_S = 60.0
"""A failure after this time counts as a hang."""
MOST_HANGS = 5
"""Number of hangs after which the remaining checks are skipped, to save hours."""


@dataclass(frozen=True)
class Result:
    """The outcome of a check: passed, failed, skipped, or crashed with its process."""

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
    """Return the checks of a level and of lower levels, in order; `groups` restricts them.

    Raises `BackendError` for a group that is not in `GROUPS`.
    """
    import hetpipe.conformance.all  # noqa: F401 - fills CHECKS
    from hetpipe.conformance.check import CHECKS

    if unknown := [group for group in groups if group not in GROUPS]:
        raise BackendError(f"no group {unknown[0]!r} of checks; known: {', '.join(GROUPS)}")
    if level is Level.FULL:
        from hetpipe.conformance.database import add_checks

        add_checks()  # imports torch's database, which takes seconds
    asked = groups or GROUPS
    chosen = (each for each in CHECKS if each.level <= level and each.group in asked)
    return sorted(chosen, key=lambda each: (each.level, GROUPS.index(each.group)))


def rig_of(device_id: str) -> Rig:
    """Open the device under test alone, without a companion that runs operators for it.

    Raises `BackendError` if the device is missing or does not open.
    """
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
    """Yield the results of the checks of a level, or of some of its groups, as checks end.

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
        reason = f"not run: {hanging} checks have waited in vain for the device"
        yield Result(each.name, "skipped", reason, family=each.family)


def _results(
    arguments: tuple[object, ...], first: int, checks: list[Check], limit_s: float
) -> Iterator[Result]:
    """Yield the results of one process: up to the last check, or to the check that ends it."""
    with tempfile.TemporaryFile() as log:
        reading, writing = os.pipe()
        child = subprocess.Popen(
            process.command("hetpipe.conformance.run", writing, limit_s, *arguments, first),
            env=process.environment(),
            pass_fds=(writing,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        os.close(writing)
        try:
            with os.fdopen(reading, "rb", buffering=0) as lines:
                for each in checks[first:]:
                    text, late = _line(lines, limit_s + GRACE_S)
                    if text:
                        yield Result(**json.loads(text))
                        continue
                    how = f"has not ended after {limit_s:g} s"
                    if not late:
                        said, place = _end_of(child, log)
                        late = place is not None
                        how = f"{how}: it hangs {place}" if late else said
                    yield Result(
                        each.name, "crashed", how, limit_s if late else 0.0,
                        each.rule, each.suspect, each.family,
                    )  # fmt: skip
                    return
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _line(lines: Any, limit_s: float) -> tuple[bytes, bool]:
    """Return the next line, empty at the end of the stream; and whether the time ran out."""
    text, end_s = b"", time.monotonic() + limit_s
    while not text.endswith(b"\n"):
        left_s = end_s - time.monotonic()
        if left_s <= 0 or not select.select([lines], [], [], left_s)[0]:
            return b"", True
        part = lines.read(1)
        if not part:
            return b"", False
        text += part
    return text, False


def _end_of(child: subprocess.Popen[bytes], log: BinaryIO) -> tuple[str, str | None]:
    """Return a description of a process's end, and the place where it hung, if it did."""
    code = child.wait()
    log.seek(0)
    text = log.read().decode(errors="replace")
    last = (text.strip().splitlines() or ["no output"])[-1]
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit status {code}"
    return f"the process ended in the middle of it, with {how}: {last}", hangs.place(text)


def main(
    writing: int,
    limit_s: float,
    reference: str,
    device_id: str,
    level: int,
    groups: Collection[str],
    first: int,
) -> None:
    """Run the checks from number `first` on, and write a line of JSON for each result.

    The process exits during a check that takes longer than `limit_s`.
    """
    load_reference(reference)
    rig = rig_of(device_id)
    with os.fdopen(writing, "w") as lines:
        for each in checks_of(Level(level), groups)[first:]:
            hangs.watch(limit_s, sys.stderr)
            lines.write(json.dumps(asdict(run_check(each, rig))) + "\n")
            lines.flush()
    os._exit(0)  # skips the driver's exit handlers, which may crash


if __name__ == "__main__":
    _writing, _limit_s, _reference, _device, _level, _groups, _first = sys.argv[1:]
    _named = [group for group in _groups.split(",") if group]
    main(int(_writing), float(_limit_s), _reference, _device, int(_level), _named, int(_first))
