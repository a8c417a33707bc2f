"""The backend of torch: finds and opens its devices."""

from __future__ import annotations

import platform
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from hetpipe.errors import BackendError
from hetpipe.records import Source
from hetpipe.sdk.backend import Backend, Finding
from hetpipe.sdk.info import (
    HOST_MEMORY,
    Capabilities,
    DeviceInfo,
    Execution,
    host_memory_nbytes,
    pci_address,
    with_separate_memory,
)

from .device import DTYPES, CpuDevice, SynchronizedDevice, TorchDevice
from .options import Options, lacks_compiler
from .streams import StreamDevice


class PyTorchBackend(Backend):
    """The installed torch's devices: `pytorch:cpu:0`, and accelerators such as `pytorch:cuda:0`.

    The backend keeps fused operators whole, because torch has kernels for them.

    A subclass with another name may replace operators with Python functions:

        class Mine(PyTorchBackend):
            name = "mine"
            operators = {"aten.gelu.default": my_gelu}  # takes the operator's arguments
    """

    name = "pytorch"
    discover_limit_s = 60.0
    """NVIDIA's driver may need 3 s to wake each card, and a machine may have 16 cards."""
    operators: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def __init__(self) -> None:
        self._options = Options()

    def configure(self, options: Mapping[str, Any], folder: Path) -> None:
        """Read the options of a cluster file; see `Options`."""
        source = Source(f"the options of backend {self.name}", BackendError)
        self._options = source.record(Options, dict(options))

    def discover(self) -> list[DeviceInfo]:
        return [
            replace(
                info,
                id=info.id.replace("pytorch", self.name, 1),
                backend=self.name,
                driver=info.driver + self._options.changed(_kind(info)),
            )
            for info in (_cpu(), *_accelerators())
        ]

    def describe(self) -> list[Finding]:
        findings = super().describe()
        for info in self.discover():
            if self._options.compile != "eager" and (lack := lacks_compiler(_kind(info))):
                what, cure = lack
                text = f"{info.id} runs all graphs eagerly, because Inductor needs {what}"
                findings.append(("missing", text, cure))
        return findings

    def open(self, info: DeviceInfo) -> TorchDevice:
        kind, index = _kind(info), int(info.id.split(":")[2])
        if kind == "cpu":
            return CpuDevice(info, torch.device("cpu"), self.operators, self._options)
        device = torch.device(kind, index)
        module = torch.get_device_module(kind)
        if not hasattr(module, "Stream"):
            return SynchronizedDevice(info, device, self.operators, self._options)
        return StreamDevice(info, device, module, self.operators, self._options)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return {}

    def worker_environment(self, info: DeviceInfo, cores: int) -> dict[str, str]:
        return {} if info.kind == "cpu" else {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _kind(info: DeviceInfo) -> str:
    """Return torch's name for the type of a device, such as `cuda`."""
    return info.id.split(":")[1]


def _cpu() -> DeviceInfo:
    return DeviceInfo(
        id="pytorch:cpu:0",
        backend="pytorch",
        kind="cpu",
        name=_cpu_name(),
        vendor="torch",
        driver=torch.__version__,
        memory_nbytes=host_memory_nbytes(),
        memory_domain=HOST_MEMORY,
        dtypes=DTYPES,
        # Two passes never write the same tensor, and torch's kernels and inference mode may be
        # used by several threads at once.
        capabilities=Capabilities(queues=2),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _accelerators() -> list[DeviceInfo]:
    """Return the devices of the one accelerator type that this torch is built for, if any.

    This creates no context on a card, so it takes no memory there.
    """
    if not torch.accelerator.is_available():
        return []
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    count = torch.accelerator.device_count()
    return with_separate_memory([_accelerator(accelerator.type, index) for index in range(count)])


def _accelerator(kind: str, index: int) -> DeviceInfo:
    module = torch.get_device_module(kind)
    properties: Any = None
    if hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(index)
    version = torch.version.hip or torch.version.cuda or ""
    address, host_nbytes = _address(properties), host_memory_nbytes()
    nbytes = int(getattr(properties, "total_memory", 0)) or host_nbytes
    in_host = _is_integrated(kind, properties)
    return DeviceInfo(
        id=f"pytorch:{kind}:{index}",
        backend="pytorch",
        kind="gpu",
        name=getattr(properties, "name", kind),
        vendor=_vendor(kind),
        driver=f"{torch.__version__} {kind} {version}".strip(),
        memory_nbytes=min(nbytes, host_nbytes) if in_host else nbytes,
        memory_domain=HOST_MEMORY if in_host else address or f"{kind}:{index}",
        dtypes=tuple(d for d in DTYPES if d != "float64" or _has_float64(kind, properties)),
        execution=Execution.SYNC,
        address=address,
    )


def _vendor(kind: str) -> str:
    if kind == "cuda":
        return "AMD" if torch.version.hip else "NVIDIA"
    return {"xpu": "Intel", "mps": "Apple"}.get(kind, kind)


def _has_float64(kind: str, properties: Any) -> bool:
    """Return whether a device computes in float64; some of Intel's cards do not."""
    return kind != "mps" and bool(getattr(properties, "has_fp64", True))


def _is_integrated(kind: str, properties: Any) -> bool:
    """Return whether a device computes in the host's memory. Apple's always do."""
    names = ("is_integrated", "is_integrated_gpu")  # of CUDA and of XPU
    return kind == "mps" or any(getattr(properties, name, False) for name in names)


INTEL = 0x8086
"""The first two bytes of a UUID that Intel's drivers make. Bytes 6 to 9 are the address of the
card: domain, bus and device. All of Intel's drivers use this form; torch tells nothing else."""


def _address(properties: Any) -> str:
    """Return the address of a card on the PCI bus; empty if torch does not tell it."""
    if hasattr(properties, "pci_bus_id"):
        domain = getattr(properties, "pci_domain_id", 0)
        return pci_address(domain, properties.pci_bus_id, properties.pci_device_id)
    uuid = bytes(getattr(getattr(properties, "uuid", None), "bytes", ()))
    if len(uuid) == 16 and struct.unpack_from("<H", uuid)[0] == INTEL:
        return pci_address(*struct.unpack_from("<HBB", uuid, 6))
    return ""
