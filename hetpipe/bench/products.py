"""Matrix products of the devices here, each in a process of its own on one core."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any

from hetpipe import process
from hetpipe.cluster import available_cores
from hetpipe.crew.settings import usual_settings
from hetpipe.errors import HetpipeError
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.registry import discover_devices, get_backend

LIMIT_S = 300.0


def products(devices: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The fields of `MatmulFigures` for every processor that can measure its own ceiling.

    With `devices` for these alone. Raises `HetpipeError` for one that is not here or cannot do it.
    """
    infos, _ = discover_devices()
    if devices:
        return [_asked(device, infos) for device in devices]
    processors = [i for i in infos if i.kind == "cpu" and not i.capabilities.reference]
    figures = [_measure(info) for info in processors if not info.capabilities.emulated]
    return [each for each in figures if each is not None]


def _asked(device: str, infos: Sequence[DeviceInfo]) -> dict[str, Any]:
    info = next((info for info in infos if info.id == device), None)
    if info is None:
        raise HetpipeError(f"no device {device!r}; found: {', '.join(i.id for i in infos)}")
    figures = _measure(info)
    if figures is None:
        raise HetpipeError(f"{device} cannot tell its ceiling; name a processor of a backend")
    return figures


def _measure(info: DeviceInfo) -> dict[str, Any] | None:
    settings = usual_settings(1) | get_backend(info.backend).worker_environment(info, 1)
    core = available_cores()[0]

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})

    done = subprocess.run(
        process.command("hetpipe.bench.matmul", "--json", info.id),
        env=process.environment(settings),
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
