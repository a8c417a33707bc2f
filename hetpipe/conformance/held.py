"""Memory that a device holds: leaks, trims, and more than there is."""

from __future__ import annotations

import gc
import resource
from typing import Any

import numpy as np
import torch

from hetpipe.conformance.buffers import random_array, same
from hetpipe.conformance.check import BrokenRule, Level, NotAsked, check, expect
from hetpipe.conformance.rig import WAIT_S, Rig

CYCLES = 60  # of upload, compile, run and drop, in the search for leaks
LEAK_NBYTES = 1 << 20  # what a cycle holds


def _resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@check(
    "memory/no leaks",
    "buffers and executables that nobody has any more give their memory back",
    "leaking: memory that is never freed",
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
    gc.collect()
    held, resident = rig.device.memory_used_nbytes(), _resident_nbytes()
    for number in range(CYCLES):
        cycle(number % 6 == 0)
    gc.collect()
    counted = rig.device.memory_used_nbytes()
    if held is not None and counted is not None:
        expect(
            counted - held < LEAK_NBYTES * CYCLES // 8,
            f"by its own count the device holds {counted - held} bytes more after {CYCLES} runs "
            f"of {3 * LEAK_NBYTES} bytes each",
        )
    grown = _resident_nbytes() - resident
    expect(
        grown < LEAK_NBYTES * CYCLES // 4,
        f"this process has {grown} bytes more after {CYCLES} runs of {3 * LEAK_NBYTES} bytes each",
    )


@check(
    "memory/trim",
    "trim frees what nothing uses, and the device goes on working",
    "a pool that frees tensors which somebody has, or memory of compiled graphs",
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
    same(rig.get(kept), x, "a buffer that was there before a trim")


@check(
    "memory/too much",
    "where memory does not suffice a BackendError says so, and the device goes on working",
    "an error of the driver that nobody catches, or a device that is lost with it",
    Level.FULL,
)
def _(rig: Rig) -> None:
    from hetpipe.errors import BackendError

    if rig.info.memory_domain == "host":
        raise NotAsked("its memory is the host's, which other processes need")
    elements = rig.info.memory_nbytes // 4 + 1
    tiny = np.zeros(1, np.float32)
    try:
        rig.device.upload(np.broadcast_to(tiny, (elements,)))[1].wait(WAIT_S)
    except BackendError:
        pass
    else:
        raise BrokenRule(f"an upload of {elements * 4} bytes fits into {rig.info.memory_nbytes}")
    same(rig.get(rig.put(tiny)), tiny, "a small buffer afterwards")
