"""Options of the backend, and the kernel family of a device: `kernels/cpu`, `gpu` or `fpga`.

A cluster file may choose the family; the variable `HETPIPE_OPENCL_FAMILIES` overrides the file:

    [backend.opencl]
    families = { "opencl:intel-fpga-emulator:0" = "fpga" }
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated

from hetpipe.errors import BackendError
from hetpipe.records import Name, Number, OneOf
from hetpipe.sdk.info import DeviceInfo
from hetpipe.words import short

FAMILIES = ("cpu", "gpu", "fpga")
CHANNELS = "cl_intel_channels"
"""The OpenCL extension for kernels that send data to each other."""
MOST_KERNELS = 8
"""Most kernels that run at the same time.

Channels join up to four kernels, and kernels that are joined so are a dataflow.
"""
VARIABLE = "HETPIPE_OPENCL_FAMILIES"
"""Environment variable: a family for all devices, or `PATTERN=FAMILY,PATTERN=FAMILY`."""


def default_family(info: DeviceInfo) -> str:
    """Return the family of a device's kind, or "cpu" for an FPGA emulator: it computes on the
    host's cores, where the kernels of `cpu` are many times faster than the kernels of `fpga`."""
    if info.kind == "fpga" and not info.on_cores:
        return "fpga"
    return "gpu" if info.kind == "gpu" else "cpu"


@dataclass(frozen=True)
class Choice:
    """The user's choice of families, by patterns of device ids; the last matching pattern wins."""

    by_pattern: Mapping[str, str] = field(default_factory=dict)

    def of(self, device_id: str) -> str:
        """Return the family that the user chose for a device, or ""."""
        fitting = (f for pattern, f in self.by_pattern.items() if fnmatchcase(device_id, pattern))
        return "".join(list(fitting)[-1:])

    def check(self, ids: Sequence[str]) -> None:
        """Raise `BackendError` for a pattern that matches no device id."""
        for pattern in self.by_pattern:
            if not any(fnmatchcase(device_id, pattern) for device_id in ids):
                there = ", ".join(ids)
                raise BackendError(
                    f"a family is chosen for {short(pattern)}, but no device "
                    f"matches it; the devices are {there}"
                )


def choice(by_pattern: Mapping[str, str]) -> Choice:
    """Return the choice of the cluster file, overridden by the variable. Raises `BackendError` if
    the variable names an unknown family."""
    text = os.environ.get(VARIABLE, "").strip()
    pairs = [part if "=" in part else f"*={part}" for part in text.split(",") if part.strip()]
    named = {}
    for pattern, _, family in (pair.partition("=") for pair in pairs):
        named[pattern.strip()] = family.strip()
        if family.strip() not in FAMILIES:
            there = ", ".join(FAMILIES)
            raise BackendError(f"{VARIABLE}: there is no family {short(family)}; there are {there}")
    # The last matching pattern wins, so all patterns of the variable come last.
    return Choice({p: f for p, f in by_pattern.items() if p not in named} | named)


@dataclass(frozen=True)
class Options:
    """The table [backend.opencl] of a cluster file."""

    kernels: tuple[str, ...] = ()
    """Specifications of user kernels, which take precedence over shipped kernels."""
    bundles: Name | None = None
    """A folder of bundles. Kernels are loaded from the bundles, and none is compiled."""
    families: dict[str, Annotated[str, OneOf(FAMILIES)]] = field(default_factory=dict)
    """Families of shipped kernels, by device id or by a pattern such as `opencl:pocl:*`."""
    channels: bool = True
    """Whether channels join kernels of the family fpga, on devices that support channels."""
    dataflow_limit_s: Annotated[float, Number(above=True)] = 600.0
    """A dataflow counts as stuck if none of its kernels begins or ends for this many seconds."""
