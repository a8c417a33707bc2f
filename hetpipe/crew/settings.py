"""The environment variables of workers: those of all, and those that their backends ask for.

Workers with the same variables of libraries come from one fork server (`hetpipe.crew.forkserver`).
"""

from __future__ import annotations

import os

from hetpipe.cluster.member import Member
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.isolation import blamed
from hetpipe.sdk.registry import companion_of, get_backend

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Thread pools of the libraries that torch and numpy bring."""
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # glibc takes no more
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""For glibc: freed activations stay with the process. By default they go back to the system, and
every micro-batch faults its pages in anew: a tenth of a step."""


def settings_of(member: Member, info: DeviceInfo) -> dict[str, str]:
    """The variables to set for a member's worker; those of its backend go before a companion's."""
    cores = len(member.cores) or len(os.sched_getaffinity(0))
    settings = usual_settings(cores)
    if companion := companion_of(info.backend):
        settings |= _asked_of(companion, cores)
    return settings | _asked_of(info, cores)


def _asked_of(info: DeviceInfo, cores: int) -> dict[str, str]:
    with blamed(info.backend, f"fails to give the settings of {info.id}"):
        return get_backend(info.backend).worker_environment(info, cores)


def usual_settings(cores: int) -> dict[str, str]:
    """The variables of a worker with so many cores, before its backend changes any."""
    # Members share this host: gloo must not look the host's name up to find an interface.
    gloo = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    return dict.fromkeys(THREADS, str(cores)) | KEEP_MEMORY | gloo
