"""Chooses the environment variables of workers: common ones, and the requests of their backends.

Workers with the same library variables come from one fork server (`hetpipe.crew.forkserver`).
"""

from __future__ import annotations

import os

from hetpipe.cluster.member import Member
from hetpipe.sdk.host.isolation import blamed
from hetpipe.sdk.host.registry import companion_of, get_backend
from hetpipe.sdk.info import DeviceInfo

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables for the thread pools of the libraries that torch and numpy bring."""
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # glibc accepts no larger value
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""For glibc: freed activations stay with the process. By default they return to the system, and
every micro-batch faults its pages in again, which costs a tenth of a step."""


def settings_of(member: Member, info: DeviceInfo) -> dict[str, str]:
    """Return the variables for a member's worker; its backend's override a companion's."""
    cores = len(member.cores) or len(os.sched_getaffinity(0))
    settings = usual_settings(cores)
    if companion := companion_of(info.backend):
        settings |= _backend_settings(companion, cores)
    return settings | _backend_settings(info, cores)


def _backend_settings(info: DeviceInfo, cores: int) -> dict[str, str]:
    with blamed(info.backend, f"fails to give the settings of {info.id}"):
        return get_backend(info.backend).worker_environment(info, cores)


def usual_settings(cores: int) -> dict[str, str]:
    """Return the variables of a worker with `cores` cores, before its backend changes any."""
    # Members share this host, so gloo need not look up the host's name to find an interface.
    gloo = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    return dict.fromkeys(THREADS, str(cores)) | KEEP_MEMORY | gloo
