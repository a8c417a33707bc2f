"""Kernels under Oclgrind, which checks every access to memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyopencl as cl
from hetpipe.backends.opencl.device import OpenCLDevice
from hetpipe.backends.opencl.run.memory import Piece
from opencl_devices import IDS

ORACLE = next((device_id for device_id in IDS if "oclgrind" in device_id), None)


def poison(device: OpenCLDevice) -> None:
    """Fill all memory that the device creates from now on with NaN."""
    create = device.memory.create

    def poisoned(nbytes: int) -> Piece:
        piece = create(nbytes)
        cl.enqueue_fill_buffer(device.queue, piece.cl, np.float32("nan"), 0, nbytes // 4 * 4)
        device.queue.finish()
        return piece

    device.memory.create = poisoned  # type: ignore[method-assign]


def log_of(code: str, folder: Path, *checks: str) -> str:
    """Run `code` in a new process and return the log of Oclgrind."""
    log = folder / "log.txt"
    settings = {"OCLGRIND_LOG": str(log), **dict.fromkeys(checks, "1")}
    here = Path(__file__).parent
    head = (
        f"import sys\nsys.path[:0] = [{str(here)!r}, {str(here.parent)!r}]\nORACLE = {ORACLE!r}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code], env=os.environ | settings, capture_output=True,
        text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
    return log.read_text() if log.exists() else ""
