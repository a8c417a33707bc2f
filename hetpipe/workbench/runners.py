"""The backends that run single kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hetpipe.errors import BackendError
from hetpipe.sdk.host.registry import backend_names, devices_of, get_backend
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.kernels import KernelRunner


def runners() -> Iterator[tuple[str, KernelRunner]]:
    """Yield the name and the runner of each backend that runs single kernels."""
    for name in backend_names():
        try:
            runner = get_backend(name).kernel_runner()
        except BackendError:
            continue  # `hetpipe doctor` says why
        if runner is not None:
            yield name, runner


def devices_with_kernels(suffix: str = "") -> list[DeviceInfo]:
    """Return the devices that run single kernels, or only files with this suffix."""
    able = [name for name, runner in runners() if suffix in ("", runner.suffix)]
    return [info for name in able for info in devices_of(name)]


def runner_of(source: Path) -> KernelRunner:
    """Return the runner for a file's suffix. Raises `BackendError` if no backend has a runner."""
    known = [runner for _, runner in runners() if runner.suffix == source.suffix]
    if not known:
        suffixes = ", ".join(sorted({runner.suffix for _, runner in runners()})) or "none"
        raise BackendError(
            f"no backend runs kernels of {source}; suffixes that can be run: {suffixes}; `hetpipe "
            "doctor` says which parts of backends are missing"
        )
    return known[0]
