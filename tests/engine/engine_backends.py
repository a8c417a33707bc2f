"""Backends that misbehave, and functions that tests call in workers.

`faulty:raise:0` raises in its third run, `faulty:slow:0` takes two seconds for it, `faulty:hang:0`
never ends it and `faulty:die:0` kills its process there. `faulty:stall:0` never ends its sixth run.
`faulty:shut:0` cannot be opened, nor `faulty:away:0` while the file exists that the option `away`
names. `faulty:good:0` is numpy.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetpipe.backends.numpy import NumpyBackend, NumpyDevice

import hetpipe.sdk.graph
from hetpipe.crew import fleet
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Buffer
from hetpipe.sdk.graph import graph_structure, resolve_operator
from hetpipe.sdk.info import DeviceInfo

KINDS = ("good", "raise", "hang", "stall", "slow", "die", "shut", "away")


class FaultyBackend(NumpyBackend):
    name = "faulty"
    away = Path()
    """Nothing can open `faulty:away:0` while this file exists."""

    def configure(self, options: Mapping[str, Any], folder: Path) -> None:
        self.away = folder / options["away"]

    def discover(self) -> list[DeviceInfo]:
        (info,) = super().discover()
        return [replace(info, id=f"faulty:{kind}:0", backend="faulty") for kind in KINDS]

    def open(self, info: DeviceInfo) -> NumpyDevice:
        if "shut" in info.id or ("away" in info.id and self.away.is_file()):
            raise BackendError("the driver is away; bring it back")
        return FaultyDevice(info)


class FaultyDevice(NumpyDevice):
    runs = 0

    def _run(self, program: Any, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        self.runs += 1
        kind = self.info.id.split(":")[1]
        if kind == "stall" and self.runs == 6:
            time.sleep(1000)
        if self.runs == 3:
            if kind == "raise":
                raise ValueError("boom 42")
            if kind == "die":
                os.kill(os.getpid(), signal.SIGSEGV)
            if kind == "hang":
                time.sleep(1000)
            if kind == "slow":
                time.sleep(2)
        return super()._run(program, inputs, donate)


def imported(device: Any) -> set[str]:
    """Return the names of the modules that a worker has imported."""
    return set(sys.modules)


def start_no_worker() -> None:
    """Let this host have no descriptors for new workers."""

    def start(*args: Any) -> Any:
        raise OSError(24, "Too many open files")

    fleet.start_worker = start


def pid(device: Any) -> int:
    return os.getpid()


def lose_operator(device: Any, name: str) -> None:
    """Let this worker's torch lack an operator from now on, in place of an earlier one."""

    def resolve(wanted: str) -> Any:
        if wanted == name:
            raise BackendError("torch has no such operator")
        return resolve_operator(wanted)

    hetpipe.sdk.graph.resolve_operator = resolve


def spoil_operator(device: Any, name: str, error: float) -> None:
    """Let this worker's numpy compute an operator with a relative error from now on."""
    from hetpipe.backends.numpy.operators import OPERATORS

    right = _right.setdefault(name, OPERATORS[name])
    OPERATORS[name] = lambda *args, **kwargs: (1 + error) * right(*args, **kwargs)


_right: dict[str, Any] = {}
"""The spoiled operators as they were."""


def scale(device: Any, factor: float, seconds: float) -> tuple[str, float]:
    time.sleep(seconds)
    return device.info.id, factor * 2


def ignored_interrupts(device: Any) -> bool:
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def cores(device: Any) -> list[int]:
    return sorted(os.sched_getaffinity(0))


def variable(device: Any, name: str) -> str | None:
    return os.environ.get(name)


def folder(device: Any) -> str:
    """Return the working folder of a worker."""
    return os.getcwd()


def compute_with_the_lock(device: Any, count: int) -> int:
    """Keep the interpreter's lock in one long call."""
    return sum(range(count))


def sleep_with_the_lock(device: Any, seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)


def nap(device: Any, seconds: float) -> None:
    """Sleep for `seconds`."""
    time.sleep(seconds)


class EarlyBackend(NumpyBackend):
    """A device that compiles ahead, records the announced graphs, and supports no sine."""

    name = "early"

    def discover(self) -> list[DeviceInfo]:
        (info,) = super().discover()
        able = replace(info.capabilities, compiles_ahead=True)
        return [replace(info, id="early:cpu:0", backend="early", capabilities=able)]

    def open(self, info: DeviceInfo) -> NumpyDevice:
        return EarlyDevice(info)


class EarlyDevice(NumpyDevice):
    def __init__(self, info: DeviceInfo) -> None:
        super().__init__(info)
        self.ahead: list[str] = []
        self.compiled: list[str] = []

    def supports(self, node: Any) -> str | None:
        return "no sines here" if "sin" in str(node.target) else super().supports(node)

    def compile_ahead(self, graphs: Any) -> None:
        self.ahead += [repr(graph_structure(graph)) for graph in graphs]

    def compile(self, graph: Any) -> Any:
        self.compiled.append(repr(graph_structure(graph)))
        return super().compile(graph)


def forecasts(device: EarlyDevice) -> tuple[list[str], list[str]]:
    """Return the graphs announced and the graphs compiled since the last call."""
    seen = device.ahead, device.compiled
    device.ahead, device.compiled = [], []
    return seen


LARGE_NBYTES = 1 << 20


def large(device: Any) -> bytes:
    """Return a reply that needs a file descriptor."""
    return bytes(LARGE_NBYTES)


def without_descriptors(device: Any, nbytes: int) -> bytes:
    """Return a reply that needs a file descriptor after using up all descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")),) * 2)
    while True:
        try:
            os.dup(0)
        except OSError:
            return bytes(nbytes)


def spoil(device: Any) -> None:
    """Let all later runs on this device return NaN."""
    run = device._run

    def spoiled(*args: Any) -> list[Any]:
        outputs: list[Any] = run(*args)
        for output in outputs:
            if output.array.dtype.kind == "f":
                output.array[...] = math.nan
        return outputs

    device._run = spoiled


def hang_in_copies(device: Any) -> None:
    """Let this worker never return from a copy of its values."""
    from hetpipe.worker.copying import Copying

    Copying.copy = lambda *_: time.sleep(1000)  # type: ignore[method-assign]
