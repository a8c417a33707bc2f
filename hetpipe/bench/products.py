"""Matrix products of the OpenCL devices here, each in a process of its own that has one core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from hetpipe.cluster import available_cores
from hetpipe.errors import HetpipeError
from hetpipe.sdk.registry import discover_devices, get_backend

BACKEND = "opencl"  # this benchmark's subject: its kernels against their ceiling
LIMIT_S = 300.0


def products() -> list[dict[str, Any]]:
    """The fields of `MatmulFigures` for every device that is no emulator; [] without OpenCL."""
    infos, _ = discover_devices([BACKEND])
    able = [i for i in infos if not (i.capabilities.emulated or i.capabilities.reference)]
    return [_measure(info.id, get_backend(BACKEND).worker_environment(info, 1)) for info in able]


def _measure(device_id: str, settings: dict[str, str]) -> dict[str, Any]:
    core = available_cores()[0]

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})

    done = subprocess.run(
        [sys.executable, "-m", "hetpipe.bench.matmul", "--json", device_id],
        env={**os.environ, **settings, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        preexec_fn=pin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise HetpipeError(f"matrix products on {device_id} failed: {last}")
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures
