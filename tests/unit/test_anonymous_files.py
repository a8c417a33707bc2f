"""Anonymous memory is there before it is written, or there is an error."""

from __future__ import annotations

import os
import resource

import pytest

from hetpipe.errors import HetpipeError
from hetpipe.memory import anonymous_file


def test_the_memory_is_taken_at_once() -> None:
    """Without room, a later write would end the process by SIGBUS."""
    descriptor = anonymous_file(1 << 20)
    status = os.fstat(descriptor)
    os.close(descriptor)
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20


def test_a_lack_of_memory_is_an_error() -> None:
    """A limit on the size of files imitates it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(HetpipeError, match=r"no 1 MiB of shared memory \(File too large\)"):
            anonymous_file(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_python_without_the_call_uses_the_systems_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    descriptor = anonymous_file(10)
    kind, inherits = os.readlink(f"/proc/self/fd/{descriptor}"), os.get_inheritable(descriptor)
    os.close(descriptor)
    assert kind.startswith("/memfd:hetpipe")
    assert not inherits
