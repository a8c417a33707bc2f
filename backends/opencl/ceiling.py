"""The arithmetic ceiling of a device: the most that its kernels could reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .builder import Kernel, kernel_source
from .driver import driver

if TYPE_CHECKING:
    from .device import OpenCLDevice

CHAINS, LANES = 12, 16
"""Independent multiply-adds of a work-item, as in `kernels/cpu/ceiling.cl`."""
WORK_ITEMS, REPEATS = 32, 40_000


def fma_ceiling(device: OpenCLDevice) -> tuple[Callable[[], None], int]:
    """(run, operations): `run` does that number of float32 operations in registers, and waits."""
    cl = driver()
    source = kernel_source("cpu/common.cl") + kernel_source("cpu/ceiling.cl")
    ceiling = Kernel(source, "fma_ceiling")
    device.programs.prepare([ceiling])
    kernel = device.programs.kernel(ceiling)
    out = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, WORK_ITEMS * LANES * 4)

    def run() -> None:
        kernel.set_args(out, np.int32(REPEATS))  # here, so that `out` lives as long as `run`
        cl.enqueue_nd_range_kernel(device.queue, kernel, (WORK_ITEMS,), (1,))
        device.queue.finish()

    return run, 2 * WORK_ITEMS * REPEATS * CHAINS * LANES
