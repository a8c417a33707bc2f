"""Runs a module in a child on one core, with the environment of a device's worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetpipe.child import Child, ChildError
from hetpipe.cluster.member import available_cores
from hetpipe.crew.launcher import usual_settings
from hetpipe.errors import HetpipeError
from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.info import DeviceInfo


def run_pinned(
    module: str,
    info: DeviceInfo,
    *arguments: object,
    limit_s: float,
    variables: Mapping[str, str] = {},
) -> Any:
    """Run `python -m MODULE ARGUMENTS...` as a child and return the "result" that it sends.

    `variables` are added to its environment. Raises `HetpipeError` if the child fails or takes
    longer than `limit_s`.
    """
    settings = usual_settings(1) | get_backend(info.backend).worker_environment(info, 1)
    cores = available_cores()[:1]
    try:
        with Child(module, *arguments, environment={**settings, **variables}, cores=cores) as child:
            return child.receive(limit_s)["result"]
    except ChildError as error:
        raise HetpipeError(f"{info.id}: {error}") from error
