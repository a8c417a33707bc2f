"""The arithmetic ceiling of a device, which its kernels are held against."""

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
    """(run, operations): `run` does so many float32 operations in registers and waits for them."""
    cl = driver()
    source = kernel_source("cpu/common.cl") + kernel_source("cpu/ceiling.cl")
    wanted = Kernel(source, "fma_ceiling")
    device.programs.prepare([wanted])
    kernel = device.programs.kernel(wanted)
    out = cl.Buffer(device.context, cl.mem_flags.READ_WRITE, WORK_ITEMS * LANES * 4)

    def run() -> None:
        kernel.set_args(out, np.int32(REPEATS))  # here, so that `out` lives as long as `run`
        cl.enqueue_nd_range_kernel(device.queue, kernel, (WORK_ITEMS,), (1,))
        device.queue.finish()

    return run, 2 * WORK_ITEMS * REPEATS * CHAINS * LANES
