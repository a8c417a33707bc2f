"""Which family of kernels a device gets: `kernels/cpu`, `kernels/gpu` or `kernels/fpga`.

A cluster file may choose, and the variable `HETPIPE_OPENCL_FAMILIES`, which goes first:

    [backend.opencl]
    families = { "opencl:intel-fpga-emulator:0" = "fpga" }
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from hetpipe.errors import BackendError
from hetpipe.sdk.info import DeviceInfo
from hetpipe.words import short

FAMILIES = ("cpu", "gpu", "fpga")
CHANNELS = "cl_intel_channels"
"""The extension of devices whose kernels send to one another."""
MOST_KERNELS = 8
"""At least as many kernels as run at once in a dataflow, and something beside them."""
VARIABLE = "HETPIPE_OPENCL_FAMILIES"
"""Environment variable with a family for all devices, or with `PATTERN=FAMILY,PATTERN=FAMILY`."""


def default_family(info: DeviceInfo) -> str:
    """A board gets the kernels of its kind; an FPGA's emulator computes on the host's cores, where
    those of `cpu` are many times as fast."""
    if info.kind == "fpga" and not info.on_cores:
        return "fpga"
    return "gpu" if info.kind == "gpu" else "cpu"


@dataclass(frozen=True)
class Choice:
    """Families that somebody chose, by patterns of ids of devices; the last that fits counts."""

    by_pattern: Mapping[str, str] = field(default_factory=dict)

    def of(self, device_id: str) -> str:
        """The family that was chosen for a device, or an empty text."""
        fitting = (f for pattern, f in self.by_pattern.items() if fnmatchcase(device_id, pattern))
        return "".join(list(fitting)[-1:])

    def check(self, ids: Sequence[str]) -> None:
        """Raises `BackendError` for a pattern that fits none of the ids."""
        for pattern in self.by_pattern:
            if not any(fnmatchcase(device_id, pattern) for device_id in ids):
                there = ", ".join(ids)
                raise BackendError(
                    f"a family is chosen for {short(pattern)}, and no device is that; there are "
                    f"{there}"
                )


def choice(by_pattern: Mapping[str, str]) -> Choice:
    """What a cluster file chooses, and after it the environment. Raises `BackendError`."""
    text = os.environ.get(VARIABLE, "").strip()
    pairs = [part if "=" in part else f"*={part}" for part in text.split(",") if part.strip()]
    named = {}
    for pattern, _, family in (pair.partition("=") for pair in pairs):
        named[pattern.strip()] = family.strip()
        if family.strip() not in FAMILIES:
            there = ", ".join(FAMILIES)
            raise BackendError(f"{VARIABLE}: there is no family {short(family)}; there are {there}")
    return Choice({**by_pattern, **named})
