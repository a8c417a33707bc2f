"""A device's description of itself. This module imports no torch, because planners use it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

API_VERSION = 3
"""The version of the contract. `Backend.api_version` is the version that a backend was written for.

Every change of the contract gets a new version. Version 2 added `Backend.user_kernels`,
`Capabilities.flushes_denormals` and `Capabilities.untried`. Version 3 added `DeviceInfo.address`,
`Device.pin`, `Device.memory_available_nbytes`, and windows (`Device.open_window`).
"""
OLDEST_API_VERSION = 1
"""The oldest version whose backends still run: every later addition has a default."""

KINDS = ("cpu", "gpu", "fpga", "npu", "other")

DTYPE_NBYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element, by name of dtype."""

HOST_MEMORY = "host"
"""The memory domain of devices that compute in the host's own memory, such as integrated GPUs."""


class Execution(str, Enum):
    """Whether results leave a device after a pass or during it (BaPipe, section 3)."""

    SYNC = "sync"
    """A result leaves when its pass is complete, and one pass runs at a time."""
    ASYNC = "async"
    """Results stream while the pass runs; a forward and a backward may run at once."""


@dataclass(frozen=True)
class Capabilities:
    """Optional abilities of a device. Every default is safe for any device."""

    queues: int = 1
    """Number of passes that may run at the same time, each in a separate queue and thread."""
    chunks: bool = False
    """Whether `run` returns finished parts of outputs, and `download_part` copies them."""
    emulated: bool = False
    """Whether the device emulates other hardware; its times say nothing about that hardware."""
    reference: bool = False
    """Whether the device is a reference: correct, but not fast."""
    compiles_ahead: bool = False
    """Whether `compile_ahead` makes a later compilation quick."""
    exports: bool = False
    """Whether `export` writes kernels as sources, and `build` compiles the sources."""
    untried: bool = False
    """Whether the backend does not know the device's runtime. By default, such a device joins a
    cluster only after a self-test."""
    flushes_denormals: bool = False
    """Whether results, or operands, below the smallest normal number may become zero."""


@dataclass(frozen=True)
class DeviceInfo:
    """A device that a backend found; enough to choose it without opening it.

    `id` is `backend:name:index`, unique in one machine. `memory_domain` names the physical memory
    that the device shares with other devices: capacity is counted once per domain. Graphs compute
    in `dtypes`. Graphs can also have inputs and outputs of `cast_dtypes`, but only cast them to and
    from `dtypes`. `address` names the hardware: all drivers of a card give the same address, for a
    card on the PCI bus the text of `pci_address`. It is empty if the driver does not know it.
    """

    id: str
    backend: str
    kind: str  # one of KINDS
    name: str
    vendor: str
    driver: str
    memory_nbytes: int
    memory_domain: str
    dtypes: tuple[str, ...] = ("float32", "int32", "int64", "bool")
    execution: Execution = Execution.SYNC
    capabilities: Capabilities = Capabilities()
    cast_dtypes: tuple[str, ...] = ()
    address: str = ""

    @property
    def hardware(self) -> str:
        """The address, or else the memory domain if it is not the host's; empty if unknown."""
        separate = "" if is_host_memory(self.memory_domain) else self.memory_domain
        return self.address or separate

    @property
    def on_cores(self) -> bool:
        """Whether the device computes on the cores of the host."""
        return self.kind == "cpu" or self.capabilities.emulated or self.capabilities.reference


def is_host_memory(domain: str) -> bool:
    """Return whether a memory domain is the main memory of a machine.

    In a cluster of several hosts a domain ends in "@" and an id of its machine.
    """
    return domain.partition("@")[0] == HOST_MEMORY


def host_memory_nbytes() -> int:
    """Return the bytes of the host's memory, used or not."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pci_address(domain: int, bus: int, device: int) -> str:
    """Return the address of a card on the PCI bus, such as `pci:0000:3b:00`."""
    return f"pci:{domain:04x}:{bus:02x}:{device:02x}"


def with_separate_memory(infos: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """Return the devices of one driver, with a memory domain for each part of a divided card.

    A driver may show a card as several devices at one address: tiles, or partitions. Each has a
    part of the card's memory.
    """
    parts = Counter(info.address for info in infos)
    numbers: Counter[str] = Counter()
    separate = []
    for info in infos:
        if info.address and parts[info.address] > 1 and info.memory_domain != HOST_MEMORY:
            number = numbers[info.address]
            numbers[info.address] += 1
            info = replace(info, memory_domain=f"{info.address}/{number}")
        separate.append(info)
    return separate
