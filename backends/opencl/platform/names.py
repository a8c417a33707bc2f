"""Short names and peculiarities of well-known OpenCL runtimes."""

from __future__ import annotations

import re
from dataclasses import dataclass

BUNDLES = "HETPIPE_OPENCL_BUNDLES"
"""Environment variable with the folder of bundles; used if no cluster file names one."""


@dataclass(frozen=True)
class Runtime:
    """An OpenCL runtime with peculiarities. Its platform's name contains `platform`."""

    slug: str
    platform: str
    kind: str
    emulated: bool = False
    reference: bool = False
    threads: tuple[str, ...] = ()
    """Variables that bound its thread pool."""
    waiting: tuple[str, ...] = ()
    """Variables that make its thread pool large enough for kernels that wait for each other."""
    queues: int = 1
    """Number of queues whose kernels it runs at the same time."""
    streams: bool = False
    """Whether results leave the device while a pass runs, as on the emulated hardware."""
    drains: bool = False
    """Whether a wait for an event returns only when its whole queue is empty."""
    forgets: bool = False
    """Whether it loses all compiled programs when the process ends."""
    named_arch: bool = False
    """Whether it compiles for the processor that `runtimes.target_arch` names."""
    late: bool = False
    """Whether it compiles each kernel at the kernel's first launch, one kernel at a time."""


RUNTIMES = (
    Runtime(
        "pocl", "Portable Computing Language", "cpu", late=True,
        threads=("POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT"),
    ),
    # The emulator's pool must not be bounded. Kernels joined by channels hang in a small pool, and
    # in a pool with one thread per core each switch between them takes milliseconds.
    Runtime(
        "intel-fpga-emulator", "FPGA Emulation", "fpga", emulated=True, queues=2, streams=True,
        drains=True, forgets=True, named_arch=True, waiting=("CL_CONFIG_CPU_TBB_NUM_WORKERS",),
    ),
    Runtime(
        "intel-cpu", "Intel(R) OpenCL", "cpu", drains=True, forgets=True, named_arch=True,
        threads=("CL_CONFIG_CPU_TBB_NUM_WORKERS", "DPCPP_CPU_NUM_CUS"),
    ),
    # Its only device reports all device types.
    Runtime("oclgrind", "Oclgrind", "cpu", emulated=True, reference=True),
)  # fmt: skip


def runtime_of(platform: str, is_cpu: bool) -> Runtime | None:
    """Return the entry for a platform, or None for an ordinary driver."""
    for entry in RUNTIMES:
        if entry.platform in platform and (is_cpu or entry.kind != "cpu" or entry.reference):
            return entry
    return None


def slug(vendor: str) -> str:
    """Return a short name for a vendor: `NVIDIA Corporation` becomes `nvidia`."""
    words = re.findall(r"[a-z0-9]+", vendor.lower().replace("(r)", "").replace("(tm)", ""))
    noise = {"corporation", "corp", "inc", "the", "project", "ltd", "limited", "co"}
    return "-".join([word for word in words if word not in noise][:2]) or "unknown"
