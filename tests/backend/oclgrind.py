"""Kernels under Oclgrind, which checks every access to memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from opencl_devices import IDS

ORACLE = next((device_id for device_id in IDS if "oclgrind" in device_id), None)


def log_of(code: str, folder: Path, *checks: str) -> str:
    """What Oclgrind writes when a fresh process runs `code`."""
    log = folder / "log.txt"
    settings = {"OCLGRIND_LOG": str(log), **dict.fromkeys(checks, "1")}
    head = f"TESTS = {str(Path(__file__).parent)!r}\nORACLE = {ORACLE!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code], env=os.environ | settings, capture_output=True,
        text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return log.read_text() if log.exists() else ""
