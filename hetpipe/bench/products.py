"""Matrix products on this machine's devices, each in a separate process on one core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetpipe.bench.pinned import run_pinned
from hetpipe.errors import HetpipeError
from hetpipe.sdk.host.registry import discover_devices
from hetpipe.sdk.info import DeviceInfo

LIMIT_S = 300.0


def products(devices: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return the fields of `MatmulFigures` for every processor that can measure its ceiling.

    `devices` restricts them. Raises `HetpipeError` for a device that is missing, or that cannot
    measure its ceiling.
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
    figures: dict[str, Any] | None = run_pinned(
        "hetpipe.bench.matmul", info, info.id, limit_s=LIMIT_S
    )
    return figures
