"""Description of the machine and the software of a benchmark."""

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
    """Processor, cores that may be used, memory, operating system."""
    return {
        "processor": _processor(),
        "cores": len(available_cores()),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that affect speed."""
    return {"python": platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}}


def keep_memory() -> None:
    """Freed memory stays with this process, that of large tensors too.

    Torch allocates the result of every operator. glibc maps large ones anew each time, whose pages
    then fault in: a softmax of 64 MiB takes five times as long. Elsewhere nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mmap_max, trim_threshold = -4, -1  # of malloc.h
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
    """Inside, collections of garbage pass over objects that were there before: the programs of a
    large model are millions, which take seconds each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def describe() -> str:
    """Machine and software in one line."""
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
