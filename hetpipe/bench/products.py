"""Runs a measurement, such as a rate of matrix products, in a separate process on one core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetpipe.child import Child, ChildError
from hetpipe.cluster.member import available_cores
from hetpipe.crew.launcher import usual_settings
from hetpipe.errors import HetpipeError
from hetpipe.sdk.host.registry import discover_devices, get_backend
from hetpipe.sdk.info import DeviceInfo
from hetpipe.words import choices

LIMIT_S = 300.0


def products(devices: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the figures of products (`MatmulFigures`) on processors.

    Emulated devices, references and devices without `fma_ceiling` are omitted, unless `devices`
    names the devices to measure. Raises `HetpipeError` for a named device that is missing or has
    no `fma_ceiling`.
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
        raise HetpipeError(f"no device {device!r}; {choices(device, [i.id for i in infos])}")
    figures = _measure(info)
    if figures is None:
        raise HetpipeError(
            f"{device} cannot measure its highest rate of multiply-adds, with which its products "
            "are compared; name a device that can (`Device.fma_ceiling`)"
        )
    return figures


def _measure(info: DeviceInfo) -> dict[str, Any] | None:
    figures: dict[str, Any] | None = run_pinned(
        "hetpipe.bench.matmul", info, info.id, limit_s=LIMIT_S
    )
    return figures


def run_pinned(
    module: str,
    info: DeviceInfo,
    *arguments: object,
    limit_s: float,
    variables: Mapping[str, str] = {},
) -> Any:
    """Run `python -m MODULE ARGUMENTS...` as a child on one core; return the "result" it sends.

    `variables` are added to the child's environment. Raises `HetpipeError` if the child fails or
    takes longer than `limit_s`.
    """
    settings = usual_settings(1) | get_backend(info.backend).worker_environment(info, 1)
    cores = available_cores()[:1]
    try:
        with Child(module, *arguments, environment={**settings, **variables}, cores=cores) as child:
            return child.receive(limit_s)["result"]
    except ChildError as error:
        raise HetpipeError(f"{info.id}: {error}") from error
