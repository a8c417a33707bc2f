"""Short names and peculiarities of well-known OpenCL runtimes."""

from __future__ import annotations

import re
from dataclasses import dataclass

BUNDLES = "HETPIPE_OPENCL_BUNDLES"
"""Variable with the folder of bundles, where no cluster file names one."""


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
    """Variables that give its pool threads enough for kernels that wait for one another."""
    queues: int = 1
    """Number of queues whose kernels it runs at the same time."""
    streams: bool = False
    """Whether results leave while a pass runs, as on the hardware that it emulates."""
    drains: bool = False
    """Whether a wait for an event returns only when its whole queue is empty."""
    forgets: bool = False
    """Whether it keeps no compiled programs from one process to the next."""
    named_arch: bool = False
    """Whether it makes code for the processor that `runtimes.target_arch` names."""
    late: bool = False
    """Whether it compiles a kernel when that is first launched, one kernel at a time."""


RUNTIMES = (
    Runtime(
        "pocl", "Portable Computing Language", "cpu", late=True,
        threads=("POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT"),
    ),
    # The emulator's pool must not be bounded: kernels joined by channels hang in a small pool, and
    # in one of as many threads as there are cores they take turns of milliseconds.
    Runtime(
        "intel-fpga-emulator", "FPGA Emulation", "fpga", emulated=True, queues=2, streams=True,
        drains=True, forgets=True, named_arch=True, waiting=("CL_CONFIG_CPU_TBB_NUM_WORKERS",),
    ),
    Runtime(
        "intel-cpu", "Intel(R) OpenCL", "cpu", drains=True, forgets=True, named_arch=True,
        threads=("CL_CONFIG_CPU_TBB_NUM_WORKERS", "DPCPP_CPU_NUM_CUS"),
    ),
    # Its one device claims to be of every type at once.
    Runtime("oclgrind", "Oclgrind", "cpu", emulated=True, reference=True),
)  # fmt: skip


def runtime_of(platform: str, is_cpu: bool) -> Runtime | None:
    """The entry for a platform; None for an ordinary driver."""
    for entry in RUNTIMES:
        if entry.platform in platform and (is_cpu or entry.kind != "cpu" or entry.reference):
            return entry
    return None


def slug(vendor: str) -> str:
    """`NVIDIA Corporation` -> `nvidia`."""
    words = re.findall(r"[a-z0-9]+", vendor.lower().replace("(r)", "").replace("(tm)", ""))
    noise = {"corporation", "corp", "inc", "the", "project", "ltd", "limited", "co"}
    return "-".join([word for word in words if word not in noise][:2]) or "unknown"
