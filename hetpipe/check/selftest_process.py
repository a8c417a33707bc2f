"""Self-tests of devices in separate processes: a driver that crashes or hangs harms nothing.

    this process  --pairs of reference and device-->  a process that imports torch once
                                                        |  forks one child per device, in turn
                  <--one line of JSON per device------  |<--the child's result, its end, or a kill

`trusted` remembers the devices that have passed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hetpipe import __version__, process
from hetpipe.entries import Entries, key_of
from hetpipe.environment import seconds
from hetpipe.errors import BackendError, HetpipeError
from hetpipe.sdk import hangs
from hetpipe.sdk.references import backend_reference, load_reference
from hetpipe.sdk.registry import provider_of

if TYPE_CHECKING:
    from hetpipe.sdk.info import DeviceInfo

LIMIT = "HETPIPE_SELFTEST_LIMIT_S"
"""Environment variable: time limit of a device's test in seconds; 60 by default."""

GRACE_S = 5.0
"""Seconds in which a late test may report where it hangs, before it is killed."""

_PASSED = Entries("selftests", "json", 200)


def run_selftests(infos: Sequence[DeviceInfo]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (device id, result) as tests end.

    A result has the fields of `SelfTest`, or `ok` and `message` alone.
    """
    seconds(LIMIT, 60.0)  # raises for a wrong value here, before a device could get the blame
    pairs = [(backend_reference(info.backend), info.id) for info in infos]
    for device_id in [device_id for reference, device_id in pairs if reference is None]:
        yield device_id, _test(device_id)  # another process could not load the backend's class
    arguments = [f"{reference}={device_id}" for reference, device_id in pairs if reference]
    if not arguments:
        return
    reading, writing = os.pipe()
    tester = subprocess.Popen(
        process.command("hetpipe.check.selftest_process", writing, *arguments),
        env=process.environment(),
        pass_fds=(writing,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that a kill also reaches the forked children
    )
    os.close(writing)
    waiting = [argument.rpartition("=")[2] for argument in arguments]
    try:
        with open(reading) as lines:
            for line in lines:
                device_id, result = json.loads(line)
                waiting.remove(device_id)
                yield device_id, result
        code = tester.wait()
        for device_id in waiting:
            yield device_id, _failed(f"the process of the self-tests ended with {code}")
    finally:
        if tester.poll() is None:
            os.killpg(tester.pid, signal.SIGKILL)
            tester.wait()


def trusted(info: DeviceInfo) -> str:
    """Return the reason why a device must not join a cluster by default; empty if it may.

    A device of hetpipe's backends may join, unless its capabilities say `untried`. Other devices
    are tested once, and again after a change of their backend, driver or description.
    """
    provider = provider_of(info.backend)
    if provider.ours and not info.capabilities.untried:
        return ""
    key = key_of(provider, info, __version__)
    if _PASSED.load(key) is not None:
        return ""
    ((_, result),) = run_selftests([info])
    if not result["ok"]:
        return str(result["message"])
    _PASSED.store(key, json.dumps(result).encode())
    return ""


def main(writing: int, arguments: Sequence[str]) -> None:
    """Test each device of `reference=device` in a child, and write the results to `writing`."""
    _prepare()
    limit_s = seconds(LIMIT, 60.0)
    with open(writing, "w") as lines:
        for argument in arguments:
            reference, _, device_id = argument.rpartition("=")
            result = _in_child(reference, device_id, limit_s)
            lines.write(json.dumps([device_id, result]) + "\n")
            lines.flush()


def _prepare() -> None:
    """Import torch and trace the step once for all children, without starting threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    from hetpipe.check.selftest import trace_step
    from hetpipe.sdk.graph import core_decompositions

    trace_step(core_decompositions())
    torch.set_num_threads(threads)


def _in_child(reference: str, device_id: str, limit_s: float) -> dict[str, Any]:
    """Return the result of a test in a fork of this process."""
    import select

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with open(writing, "w") as out:
            hangs.watch(limit_s, out)
            try:
                load_reference(reference)
                result = _test(device_id)
            except BaseException as error:
                result = _failed(f"{type(error).__name__}: {error}")
            json.dump(result, out)
        os._exit(0)
    os.close(writing)
    text, late = b"", False
    while True:
        if not select.select([reading], [], [], limit_s + GRACE_S)[0]:
            late = True
            os.kill(child, signal.SIGKILL)
            break
        part = os.read(reading, 1 << 16)
        if not part:
            break
        text += part
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    place = hangs.place(text.decode(errors="replace"))
    if late or place:
        where = f": it hangs {place}" if place else ""
        return _failed(f"did not end within {limit_s:g} s{where}")
    try:
        result = json.loads(text)
    except ValueError:
        end = f"signal {-status}" if status < 0 else f"exit status {status}"
        return _failed(f"its process ended in the middle of the test, with {end}")
    return result if isinstance(result, dict) else _failed(f"its process wrote {text[:100]!r}")


def _test(device_id: str) -> dict[str, Any]:
    from hetpipe.check.selftest import selftest
    from hetpipe.sdk.registry import open_device

    try:
        device = open_device(device_id)
        result = asdict(selftest(device))
        device.close()
    except HetpipeError as error:
        return _failed(str(error))
    except Exception as error:  # a backend may raise anything
        return _failed(str(BackendError(f"{device_id}: {type(error).__name__}: {error}")))
    return result


def _failed(message: str) -> dict[str, Any]:
    return {"ok": False, "message": message}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
