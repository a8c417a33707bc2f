"""Examines the backends and devices of this host, as `hetpipe doctor` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hetpipe.check.selftest_process import run_selftests
from hetpipe.errors import BackendError
from hetpipe.sdk.host.registry import backend_names, discover_devices, findings_of
from hetpipe.sdk.info import DeviceInfo


@dataclass(frozen=True)
class Finding:
    """A fact about a backend, or the result of a device's self-test, with a cure for a fault."""

    backend: str
    level: str
    what: str
    cure: str = ""
    device: DeviceInfo | None = None
    selftest: dict[str, Any] | None = None


def examine(name: str) -> list[Finding]:
    """Return a backend's findings about itself, or one finding that says why it is broken."""
    try:
        described = findings_of(name)
    except BackendError as error:
        return [Finding(name, "broken", str(error))]
    return [Finding(name, level, what, cure) for level, what, cure in described]


def examination(backends: Sequence[str], selftest: bool) -> Iterator[Finding]:
    """Yield the findings about these backends, or all, and then one for each of their devices."""
    for name in backends or backend_names():
        yield from examine(name)
    infos, _ = discover_devices([*backends] or None)
    if not selftest:
        for info in infos:
            yield Finding(info.backend, "ok", f"{info.id}: not tested", "", info)
        return
    for info, (_, result) in zip(infos, run_selftests(infos), strict=True):
        level = "ok" if result["ok"] else "broken"
        text = f"{info.id}: {_tested(result)}"
        yield Finding(info.backend, level, text, "", info, result)


def examined(backends: Sequence[str], selftest: bool) -> list[Finding]:
    """Return all findings at once, for another host."""
    return [*examination(backends, selftest)]


def _tested(result: dict[str, Any]) -> str:
    if not result["ok"]:
        return f"self-test failed: {result['message']}"
    return (
        f"{result['message']}; {result['gflops_matmul']:.3g} GFLOP/s, copies "
        f"{result['copy_Bps'] / 1e9:.3g} GB/s (best of {result['bursts']}, measured)"
    )
