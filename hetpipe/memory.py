"""The memory of this machine, and memory as a file without a name, in no folder: processes share it
by its descriptor."""

from __future__ import annotations

import os
from pathlib import Path

from hetpipe.errors import HetpipeError
from hetpipe.words import format_nbytes

_CLOSE_ON_EXEC = 1


def available_nbytes() -> int:
    """Return the memory of this machine that processes can still get, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def anonymous_file(nbytes: int = 0) -> int:
    """Return a descriptor of memory, `nbytes` long. The system frees it with its last descriptor.

    Raises `HetpipeError` if the system has no room for it: later a write would end the process.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("hetpipe")
    else:  # Python was built for a C library older than this one
        import ctypes

        descriptor = ctypes.CDLL(None, use_errno=True).memfd_create(b"hetpipe", _CLOSE_ON_EXEC)
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        if nbytes:
            os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise HetpipeError(
            f"the system gives no {format_nbytes(nbytes)} of shared memory ({error.strerror}): "
            "free memory, or use smaller micro-batches"
        ) from error
    return descriptor
