"""The arithmetic ceiling of a device, which its kernels are held against."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Device

from .builder import Kernel, kernel_source
from .device import OpenCLDevice
from .driver import driver

CHAINS, LANES = 12, 16
"""Independent multiply-adds of a work-item, as in `kernels/cpu/ceiling.cl`."""
WORK_ITEMS, REPEATS = 32, 40_000


def fma_ceiling(device: Device) -> tuple[Callable[[], None], int]:
    """(run, operations): `run` does so many float32 operations in registers and waits for them.

    Raises `BackendError` if the device is not an OpenCL one.
    """
    if not isinstance(device, OpenCLDevice):
        raise BackendError(
            f"the ceiling is of OpenCL kernels, and {device.info.id} is a device of "
            f"{device.info.backend}; give an id that starts with opencl:"
        )
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
