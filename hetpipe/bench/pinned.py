"""Run of a hetpipe module in a separate process on one core, including the device's runtime."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from hetpipe import process
from hetpipe.cluster.member import available_cores
from hetpipe.crew.worker_variables import usual_settings
from hetpipe.errors import HetpipeError
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.registry import get_backend


def run_pinned(
    module: str,
    info: DeviceInfo,
    *arguments: object,
    limit_s: float,
    variables: Mapping[str, str] = {},
) -> Any:
    """Run `python -m MODULE ARGUMENTS...` and return the JSON of the last line that it prints.

    `variables` are added to its environment. Raises `HetpipeError` if the process fails, with the
    last line of its errors, or if it takes longer than `limit_s`.
    """
    settings = usual_settings(1) | get_backend(info.backend).worker_environment(info, 1)
    core = available_cores()[0]

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})

    try:
        done = subprocess.run(
            process.command(module, *arguments),
            env=process.environment({**settings, **variables}),
            preexec_fn=pin,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        raise HetpipeError(f"{module} on {info.id} did not end within {limit_s:g} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise HetpipeError(f"{module} on {info.id} failed: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])
