"""The backend of torch: finds and opens its devices."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from hetpipe.sdk.backend import Backend
from hetpipe.sdk.info import Capabilities, DeviceInfo, Execution

from .device import DTYPES, CpuDevice, SynchronizedDevice, TorchDevice
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
    operators: ClassVar[Mapping[str, Callable[..., Any]]] = {}

    def discover(self) -> list[DeviceInfo]:
        infos = [_cpu(), *_accelerators()]
        return [
            replace(info, id=info.id.replace("pytorch", self.name, 1), backend=self.name)
            for info in infos
        ]

    def open(self, info: DeviceInfo) -> TorchDevice:
        _, kind, index = info.id.split(":")
        if kind == "cpu":
            return CpuDevice(info, torch.device("cpu"), self.operators)
        device = torch.device(kind, int(index))
        module = torch.get_device_module(kind)
        if not hasattr(module, "Stream"):
            return SynchronizedDevice(info, device, self.operators)
        return StreamDevice(info, device, module, self.operators)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return {}

    def worker_environment(self, info: DeviceInfo, cores: int) -> dict[str, str]:
        return {} if info.kind == "cpu" else {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _cpu() -> DeviceInfo:
    return DeviceInfo(
        id="pytorch:cpu:0",
        backend="pytorch",
        kind="cpu",
        name=_cpu_name(),
        vendor="torch",
        driver=torch.__version__,
        memory_nbytes=_host_memory_nbytes(),
        memory_domain="host",
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
    """Return the devices of the one accelerator type that this torch is built for, if any."""
    if not torch.accelerator.is_available():
        return []
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    kind = accelerator.type
    return [_accelerator(kind, index) for index in range(torch.accelerator.device_count())]


def _accelerator(kind: str, index: int) -> DeviceInfo:
    module = torch.get_device_module(kind)
    properties: Any = None
    if hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(index)
    version = torch.version.hip or torch.version.cuda or ""
    return DeviceInfo(
        id=f"pytorch:{kind}:{index}",
        backend="pytorch",
        kind="gpu",
        name=getattr(properties, "name", kind),
        vendor=_vendor(kind),
        driver=f"{torch.__version__} {kind} {version}".strip(),
        memory_nbytes=int(getattr(properties, "total_memory", 0) or _host_memory_nbytes()),
        memory_domain=_memory_domain(kind, index, properties),
        dtypes=tuple(d for d in DTYPES if kind != "mps" or d != "float64"),
        execution=Execution.SYNC,
    )


def _vendor(kind: str) -> str:
    if kind == "cuda":
        return "AMD" if torch.version.hip else "NVIDIA"
    return {"xpu": "Intel", "mps": "Apple"}.get(kind, kind)


def _memory_domain(kind: str, index: int, properties: Any) -> str:
    """Return a card's address on the bus, so that all its drivers name the same domain."""
    if hasattr(properties, "pci_bus_id"):
        domain, slot = getattr(properties, "pci_domain_id", 0), properties.pci_device_id
        return f"pci:{domain:04x}:{properties.pci_bus_id:02x}:{slot:02x}"
    return "host" if properties is None else f"{kind}:{index}"


def _host_memory_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
