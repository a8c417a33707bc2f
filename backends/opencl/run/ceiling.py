"""Measures two bounds of a device: its highest rate of arithmetic, its least time for a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..lower.launch import Kernel, kernel_source
from ..platform.driver import driver
from .opened import OpenedDevice

CHAINS, LANES = 12, 16
"""Independent chains of multiply-adds in a work-item, and their vector width; the values of
`kernels/cpu/ceiling.cl`."""
WORK_ITEMS, REPEATS = 32, 40_000
LAUNCHES = 200


def fma_ceiling(device: OpenedDevice) -> tuple[Callable[[], None], int]:
    """Return (run, operations): `run` does `operations` float32 operations in registers."""
    cl, kernel = driver(), _kernel(device, "fma_ceiling")
    out = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, WORK_ITEMS * LANES * 4)

    def run() -> None:
        kernel.set_args(out, np.int32(REPEATS))  # here, so that `out` lives as long as `run`
        cl.enqueue_nd_range_kernel(device.queue, kernel, (WORK_ITEMS,), (1,))
        device.queue.finish()

    return run, 2 * WORK_ITEMS * REPEATS * CHAINS * LANES


def launch_floor(device: OpenedDevice) -> tuple[Callable[[], None], int]:
    """Return (run, launches): `run` enqueues an empty kernel of one work-item `launches` times."""
    cl, kernel = driver(), _kernel(device, "nothing")

    def run() -> None:
        for _ in range(LAUNCHES):
            cl.enqueue_nd_range_kernel(device.queue, kernel, (1,), (1,))
        device.queue.finish()

    return run, LAUNCHES


def _kernel(device: OpenedDevice, name: str) -> Any:
    kernel = Kernel(kernel_source("cpu/common.cl") + kernel_source("cpu/ceiling.cl"), name)
    device.programs.prepare([kernel])
    return device.programs.kernel(kernel)
