"""Self-tests of devices in separate processes: a driver that crashes or hangs harms nothing.

    this process  -- backend and device ---->  a child that has imported torch
                                                 `-- forks for each device, one after another
                  <-- result, or fork's end ------'

`trusted` remembers the devices that have passed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hetpipe import __version__
from hetpipe.child import Child, ChildEnded, ChildLate, Parent
from hetpipe.entries import Entries, key_of
from hetpipe.environment import seconds
from hetpipe.errors import BackendError, HetpipeError
from hetpipe.sdk.host import hangs
from hetpipe.sdk.host.references import backend_reference, load_reference
from hetpipe.sdk.host.registry import provider_of

if TYPE_CHECKING:
    from hetpipe.sdk.info import DeviceInfo

LIMIT = "HETPIPE_SELFTEST_LIMIT_S"
"""Environment variable: time limit of a device's test in seconds; 60 by default."""

GRACE_S = 5.0
"""Seconds in which a late test may report where it hangs, before it is killed."""
START_LIMIT_S = 60.0
"""Time limit for the child to import torch."""

_PASSED = Entries("selftests", "json", 200)


def run_selftests(infos: Sequence[DeviceInfo]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (device id, result) as tests end.

    A result has all fields of `SelfTest`; if the test raised or did not end, it has only `ok` and
    `message`.
    """
    limit_s = seconds(LIMIT, 60.0)  # a wrong value must not count as the failure of a device
    child: Child | None = None
    try:
        for info in infos:
            reference = backend_reference(info.backend)
            if reference is None:  # no other process can load the backend's class
                yield info.id, _test(info.id)
                continue
            if child is None or not child.is_alive:
                child = Child("hetpipe.check.selftest_process", limit_s)
            yield info.id, _result(child, reference, info.id, limit_s)
    finally:
        if child is not None:
            child.close()


def _result(child: Child, reference: str, device_id: str, limit_s: float) -> dict[str, Any]:
    """Return the result of a device's test in a fork of the child."""
    try:
        child.fork(reference, device_id)
        return child.receive(START_LIMIT_S + limit_s + GRACE_S)
    except ChildEnded as error:
        if place := hangs.place(error.log):
            return _failed(f"did not end within {limit_s:g} s: it hangs {place}")
        return _failed(f"its process ended in the middle of the test, with {error.how}")
    except ChildLate:
        child.close()
        return _failed(f"did not end within {limit_s:g} s")


def trusted(info: DeviceInfo) -> str:
    """Return the reason why a device must not join a cluster by default; empty if it may.

    A device of hetpipe's own backends may join, unless its capabilities say `untried`. Every other
    device must pass a test first, and again after a change of hetpipe, backend or driver.
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


def main(limit_s: float) -> None:
    """Test the devices that the parent names, each in a fork."""
    parent = Parent()

    def test(reference: str, device_id: str) -> None:
        hangs.watch(limit_s, sys.stderr)
        try:
            load_reference(reference)
            result = _test(device_id)
        except BaseException as error:
            result = _failed(f"{type(error).__name__}: {error}")
        parent.send(result)

    _prepare()
    parent.run_forks(test)


def _prepare() -> None:
    """Import all that a test needs. Trace nothing: a trace asks CUDA whether there is a card, and
    after that no fork of this process can use one."""
    from hetpipe.sdk.graph import core_decompositions

    for module in ("hetpipe.check.selftest", "torch._dynamo"):  # a trace loads the second
        import_module(module)
    core_decompositions()


def _test(device_id: str) -> dict[str, Any]:
    from hetpipe.check.selftest import selftest
    from hetpipe.sdk.host.registry import open_device

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
    main(float(sys.argv[1]))
