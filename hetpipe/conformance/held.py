"""Checks of held memory and other resources: leaks, counters, trims, and too large requests."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hetpipe.conformance.check import BrokenRule, Level, NotAsked, check, expect, expect_refusal
from hetpipe.conformance.copies import random_array, same
from hetpipe.conformance.operators import normal
from hetpipe.conformance.rig import WAIT_S, Rig
from hetpipe.sdk.backend import Buffer, Event, Executable

CYCLES = 60  # cycles of upload, run and drop in the search for leaks; some also compile
LEAK_NBYTES = 1 << 20  # size of the buffers in a cycle
PATIENCE_S = 3.0
"""Longest wait for memory that a device frees later than Python frees the object."""
RUNS = 64  # small runs, in the search for leaked descriptors, threads and events
HELD = 16  # buffers of LEAK_NBYTES that are alive while the counter is read
SLACK_NBYTES = 64 << 20
"""Bytes that a pool may take beyond four times the requested bytes."""


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _settled(growth: Callable[[], int], limit: int) -> int:
    """Return the growth once it is below the limit, or after `PATIENCE_S`."""
    end_s = time.monotonic() + PATIENCE_S
    while (grown := growth()) >= limit and time.monotonic() < end_s:
        time.sleep(0.01)
    return grown


def _counted(rig: Rig) -> int:
    return rig.device.memory_used_nbytes() or 0


@check(
    "memory/no leaks",
    "a dropped buffer or executable gives its memory back without Python's "
    "collector of reference cycles",
    "a leak: memory that is never freed, or a reference cycle that holds a buffer",
    Level.CORE,
)
def _(rig: Rig) -> None:
    x = torch.zeros(LEAK_NBYTES // 4)
    graph = rig.graph(lambda x: (x + 1.0, x * 2.0), x)
    executable: Any = rig.device.compile(graph)

    def cycle(compiles: bool) -> None:
        program = rig.device.compile(graph) if compiles else executable
        for result in rig.run(program, [rig.put(x)]):
            rig.get(result)

    for warm in range(12):
        cycle(warm % 4 == 0)
    _without_collector(rig, lambda: cycle(False))
    gc.collect()
    held, resident = _counted(rig), _resident_nbytes()
    for number in range(CYCLES):
        cycle(number % 6 == 0)
    gc.collect()
    grown = _settled(lambda: _counted(rig) - held, LEAK_NBYTES * CYCLES // 8)
    expect(
        grown < LEAK_NBYTES * CYCLES // 8,
        f"by its own count the device holds {grown} bytes more after {CYCLES} runs of "
        f"{3 * LEAK_NBYTES} bytes each",
    )
    grown = _settled(lambda: _resident_nbytes() - resident, LEAK_NBYTES * CYCLES // 4)
    expect(
        grown < LEAK_NBYTES * CYCLES // 4,
        f"this process has {grown} bytes more after {CYCLES} runs of {3 * LEAK_NBYTES} bytes each",
    )


def _without_collector(rig: Rig, cycle: Callable[[], None]) -> None:
    """Run cycles with Python's collector off.

    Raises `BrokenRule` if only the collector frees the buffers; the error names the types in the
    reference cycle.
    """
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        before = _alive(Buffer)
        for _ in range(CYCLES // 4):
            cycle()
        limit = CYCLES // 4
        if _settled(lambda: _alive(Buffer) - before, limit) < limit:
            return
        left = _alive(Buffer) - before
        gc.set_debug(gc.DEBUG_SAVEALL)  # keeps found objects in gc.garbage, to name their types
        gc.collect()
        types = Counter(type(each).__name__ for each in gc.garbage)
        found = any(issubclass(type(each), Buffer) for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        if enabled:
            gc.enable()
    if found:
        names = ", ".join(name for name, _ in types.most_common(6))
        raise BrokenRule(
            f"{left} dropped buffers still exist after {CYCLES // 4} runs: a reference"
            f" cycle of {names} holds them until Python's collector runs; break the "
            "cycle with a weakref"
        )


def _alive(kind: type) -> int:
    # type(), because __class__ of some objects names another class.
    return sum(issubclass(type(each), kind) for each in gc.get_objects())


@check(
    "memory/nothing kept per run",
    "a run keeps no file descriptor, thread, event or buffer after it has "
    "ended and its results are dropped",
    "a leak: every run makes a descriptor, a thread or an object and never frees it",
    Level.CORE,
)
def _(rig: Rig) -> None:
    x = normal(16)
    executable = rig.compile(lambda x: x + 1.0, x)

    def cycle() -> None:
        (result,) = rig.run(executable, [rig.put(x)])
        rig.get(result)

    for _ in range(RUNS // 4):
        cycle()
    gc.collect()
    counts: dict[str, Callable[[], int]] = {
        "file descriptors": lambda: len(os.listdir("/proc/self/fd")),
        "threads": lambda: len(os.listdir("/proc/self/task")),
        "events": lambda: _alive(Event),
        "buffers": lambda: _alive(Buffer),
        "executables": lambda: _alive(Executable),
    }
    before = {name: count() for name, count in counts.items()}
    for _ in range(RUNS):
        cycle()
    gc.collect()
    for name, count in counts.items():
        grown = _settled(lambda: count() - before[name], RUNS // 2)  # noqa: B023
        expect(grown < RUNS // 2, f"this process has {grown} {name} more after {RUNS} runs")


@check(
    "memory/counter",
    "memory_used_nbytes counts bytes: at least the bytes of all existing "
    "buffers, and not many times more",
    "a counter of elements, pages or blocks instead of bytes",
    Level.CORE,
)
def _(rig: Rig) -> None:
    if rig.device.memory_used_nbytes() is None:
        raise NotAsked("the device counts no memory")
    gc.collect()
    rig.device.trim()
    before = _counted(rig)
    array = np.zeros(LEAK_NBYTES // 4, np.float32)
    buffers = [rig.put(array) for _ in range(HELD)]
    held = HELD * LEAK_NBYTES
    now = _counted(rig)
    expect(
        now >= held,
        f"the device counts {now} bytes, but the existing buffers have {held} bytes",
    )
    expect(
        now - before <= 4 * held + SLACK_NBYTES,
        f"new buffers of {held} bytes raised the count by {now - before} bytes",
    )
    expect(
        now <= rig.info.memory_nbytes,
        f"the device counts {now} bytes, but has only {rig.info.memory_nbytes} bytes",
    )
    del buffers


@check(
    "memory/available",
    "memory_available_nbytes counts the bytes that this process holds, and free bytes, in bytes",
    "a count of free bytes alone, or of other units",
    Level.CORE,
)
def _(rig: Rig) -> None:
    if rig.device.memory_available_nbytes() is None:
        raise NotAsked("the device does not know the bytes that are available")
    before = rig.device.memory_available_nbytes() or 0
    buffers = [rig.put(np.zeros(LEAK_NBYTES // 4, np.float32)) for _ in range(HELD)]
    held, now = HELD * LEAK_NBYTES, rig.device.memory_available_nbytes() or 0
    expect(
        held <= now <= rig.info.memory_nbytes,
        f"{now} bytes are available of {rig.info.memory_nbytes}, and existing buffers have {held}",
    )
    expect(
        before - now < held // 2,
        f"buffers of {held} bytes made {before - now} bytes unavailable to the process itself",
    )
    del buffers


@check(
    "memory/trim",
    "trim frees unused memory, and the device works afterwards",
    "a pool that frees existing tensors or memory of compiled graphs",
    Level.CORE,
)
def _(rig: Rig) -> None:
    x = random_array("float32", (64, 64))
    executable = rig.compile(lambda x: x + 1.0, torch.from_numpy(x))
    kept, dropped = rig.put(x), rig.put(2 * x)
    del dropped
    for _ in range(2):
        rig.device.trim()
        (result,) = rig.run(executable, [kept])
        same(rig.get(result), x + np.float32(1.0), "a result after a trim")
    same(rig.get(kept), x, "a buffer from before a trim")


@check(
    "memory/too much",
    "a device without enough memory raises BackendError, and works afterwards",
    "an uncaught error of the driver, or a device that does not work after it",
    Level.FULL,
)
def _(rig: Rig) -> None:
    if rig.info.memory_domain == "host":
        raise NotAsked("its memory is the host's memory, which other processes need")
    elements = rig.info.memory_nbytes // 4 + 1
    tiny = np.zeros(1, np.float32)
    expect_refusal(
        lambda: rig.device.upload(np.broadcast_to(tiny, (elements,)))[1].wait(WAIT_S),
        f"an upload of {elements * 4} bytes to a device of {rig.info.memory_nbytes} bytes",
    )
    same(rig.get(rig.put(tiny)), tiny, "a small buffer afterwards")
