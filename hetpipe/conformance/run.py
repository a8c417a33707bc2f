"""Runs checks in a process of its own, which streams results; a crash or a hang costs one check.

    this process  <--a line "begin NAME" and a line with the result per check--  the process
        |                                                                         that runs them
        `--where it has died, or is silent for too long: a new one, from the next check on

`python -m hetpipe.conformance.run FD LIMIT REFERENCE DEVICE LEVEL GROUPS FIRST` is that process.
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
"""The order of checks: a fault in an earlier group is likely to show in the later ones too."""
LIMIT_S = 300.0
"""The longest that one check may take."""
GRACE_S = 60.0
"""Seconds for a process to start, and for a late one to say where it hangs."""
HANG_S = 60.0
"""A check that fails after such a time has most likely waited for the device in vain."""
MOST_HANGS = 5
"""After so many of these checks the others are not run: they might take hours to say the same."""


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
        """The failure in sentences."""
        return f"{self.message}\n  the rule: {self.rule}\n  suspect: {self.suspect}"


def checks_of(level: Level, groups: Collection[str] = ()) -> list[Check]:
    """The checks of a level and of those below, in order; of some groups alone, if they are named.

    Raises `BackendError` for a group that is not in `GROUPS`.
    """
    import hetpipe.conformance.all  # noqa: F401 - fills CHECKS
    from hetpipe.conformance.check import CHECKS

    if unknown := [group for group in groups if group not in GROUPS]:
        raise BackendError(f"no group {unknown[0]!r} of checks; known: {', '.join(GROUPS)}")
    if level is Level.FULL:
        from hetpipe.conformance.database import add_checks

        add_checks()  # its import takes seconds
    asked = groups or GROUPS
    chosen = (each for each in CHECKS if each.level <= level and each.group in asked)
    return sorted(chosen, key=lambda each: (each.level, GROUPS.index(each.group)))


def rig_of(device_id: str) -> Rig:
    """The opened device under test: alone, without a companion that runs operators for it.

    Raises `BackendError` if it is not there or does not open.
    """
    from hetpipe.conformance.rig import Rig

    return Rig(open_bare(device_id))


def run_check(each: Check, rig: Rig) -> Result:
    """The result of a check. Only Ctrl-C passes."""
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
    """The results of all checks of a level, or of some groups of it, on a device, as they come.

    Raises `BackendError` if the backend cannot be loaded by another process, or for an unknown
    group.
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
    """The results of one process, which ends with the last check or with one that it dies of."""
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
    """The next line, empty at the end; and whether the time was over before it came."""
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
    """How a process ended, in words; and where it hung, if that has ended it."""
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
    """Run the checks from number `first` on, and write a line of JSON for each. Ends in the middle
    of a check that takes longer than `limit_s`."""
    load_reference(reference)
    rig = rig_of(device_id)
    with os.fdopen(writing, "w") as lines:
        for each in checks_of(Level(level), groups)[first:]:
            hangs.watch(limit_s, sys.stderr)
            lines.write(json.dumps(asdict(run_check(each, rig))) + "\n")
            lines.flush()
    os._exit(0)  # nothing of a driver's end can fail any more


if __name__ == "__main__":
    _writing, _limit_s, _reference, _device, _level, _groups, _first = sys.argv[1:]
    _named = [group for group in _groups.split(",") if group]
    main(int(_writing), float(_limit_s), _reference, _device, int(_level), _named, int(_first))
