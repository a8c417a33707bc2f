"""The machine of a benchmark: its description, its software, and its memory settings."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from hetpipe.cluster.member import available_cores

PACKAGES = ("hetpipe", "torch", "numpy", "pyopencl")


def machine() -> dict[str, Any]:
    """Return the processor, the number of available cores, the memory, and the system."""
    return {
        "processor": _processor(),
        "cores": len(available_cores()),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect speed."""
    return {"python": platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}}


def keep_memory() -> None:
    """Make this process keep freed memory, if the C library has `mallopt`.

    Torch allocates memory for the result of every operator. By default glibc maps new pages for
    each large result, and their page faults make a softmax of 64 MiB take five times as long.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 1 << 30)


def trim_memory() -> None:
    """Give freed memory back to the system, as far as the C library can."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def collecting_new() -> Iterator[None]:
    """Exclude existing objects from garbage collection within the context.

    The programs of a large model are millions of objects, and each collection would take seconds.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def describe() -> str:
    """Return a line that describes the machine and its software."""
    here = machine()
    parts = [f"{here['processor']}, {here['cores']} cores, {here['memory_nbytes'] / 2**30:.0f} GiB"]
    parts += [f"{name} {version}" for name, version in versions().items()]
    return ", ".join(parts)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
