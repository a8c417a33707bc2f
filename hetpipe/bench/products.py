"""Matrix products of the devices here, each in a process of its own that has one core."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from hetpipe import process
from hetpipe.cluster import available_cores
from hetpipe.errors import HetpipeError
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.registry import discover_devices, get_backend

LIMIT_S = 300.0


def products() -> list[dict[str, Any]]:
    """The fields of `MatmulFigures` for every processor that can tell its own ceiling."""
    found, _ = discover_devices()
    infos = [i for i in found if i.kind == "cpu" and not i.capabilities.reference]
    figures = [_measure(info) for info in infos if not info.capabilities.emulated]
    return [each for each in figures if each is not None]


def _measure(info: DeviceInfo) -> dict[str, Any] | None:
    settings = get_backend(info.backend).worker_environment(info, 1)
    core = available_cores()[0]

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})

    done = subprocess.run(
        process.command("hetpipe.bench.matmul", "--json", info.id),
        env=process.environment({**settings, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
        preexec_fn=pin,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise HetpipeError(f"matrix products on {info.id} failed: {last}")
    figures: dict[str, Any] | None = json.loads(done.stdout.strip().splitlines()[-1])
    return figures
