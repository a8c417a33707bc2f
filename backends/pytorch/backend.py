"""Which devices torch drives here."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend
from hetpipe.sdk.info import DeviceInfo

from .cpu import CpuDevice
from .device import DTYPES, TorchDevice


class PyTorchBackend(Backend):
    """torch as it is installed: `pytorch:cpu:0`, and `pytorch:cuda:0` and so on where it has them.

    Takes graphs whole: torch has kernels for the fused operators that others decompose.
    """

    name = "pytorch"

    def discover(self) -> list[DeviceInfo]:
        return [_cpu(), *_accelerators()]

    def open(self, info: DeviceInfo) -> TorchDevice:
        _, kind, _ = info.id.split(":")
        if kind == "cpu":
            return CpuDevice(info, torch.device("cpu"))
        raise BackendError(f"{info.id}: not there yet")

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return {}

    def worker_environment(self, info: DeviceInfo, cores: int) -> dict[str, str]:
        threads = str(cores if info.kind == "cpu" else 1)
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def _cpu() -> DeviceInfo:
    return DeviceInfo(
        id="pytorch:cpu:0",
        backend="pytorch",
        kind="cpu",
        name=_cpu_name(),
        vendor="torch",
        driver=torch.__version__,
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_domain="host",
        dtypes=DTYPES,
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _accelerators() -> list[DeviceInfo]:
    return []
