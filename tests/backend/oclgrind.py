"""Kernels under Oclgrind, which checks every access to memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyopencl as cl
from hetpipe.backends.opencl.device import OpenCLDevice
from hetpipe.backends.opencl.memory import Piece
from opencl_devices import IDS

from hetpipe.sdk.registry import get_backend

ORACLE = next((device_id for device_id in IDS if "oclgrind" in device_id), None)


def opened_here(device_id: str) -> OpenCLDevice:
    """The device, opened in this thread.

    Oclgrind's check for uninitialised reads crashes in other threads than that of the context, and
    `open_device` has one of its own.
    """
    backend = get_backend("opencl")
    device = backend.open(next(info for info in backend.discover() if info.id == device_id))
    assert isinstance(device, OpenCLDevice)
    return device


def poison(device: OpenCLDevice) -> None:
    """From now on all memory is NaN before anything is written to it."""
    create = device.memory.create

    def poisoned(nbytes: int) -> Piece:
        piece = create(nbytes)
        cl.enqueue_fill_buffer(device.queue, piece.cl, np.float32("nan"), 0, nbytes // 4 * 4)
        device.queue.finish()
        return piece

    device.memory.create = poisoned  # type: ignore[method-assign]


def log_of(code: str, folder: Path, *checks: str) -> str:
    """What Oclgrind writes when a fresh process runs `code`."""
    log = folder / "log.txt"
    settings = {"OCLGRIND_LOG": str(log), **dict.fromkeys(checks, "1")}
    head = f"TESTS = {str(Path(__file__).parent)!r}\nORACLE = {ORACLE!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code], env=os.environ | settings, capture_output=True,
        text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    return log.read_text() if log.exists() else ""
