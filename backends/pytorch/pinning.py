"""Host memory that a card reads and writes directly, because it is registered with the driver."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from hetpipe.sdk.info import DeviceInfo

from .device import Array


class PinnedMemory:
    """The registered ranges of host memory of one device; copies to other memory are staged.

    Only CUDA and ROCm have such a registration in torch (`module.cudart()`).
    """

    def __init__(self, info: DeviceInfo, module: Any) -> None:
        self._info = info
        self._driver = module.cudart() if hasattr(module, "cudart") else None
        self._ends: dict[int, int] = {}  # by first address

    def add(self, memory: Array) -> Callable[[], None]:
        """Register flat bytes; return a function that ends the registration, if there is one.

        Warn if the driver refuses: the copies are right without it, but slower.
        """
        begin, driver = memory.ctypes.data, self._driver
        if driver is None or memory.nbytes == 0:
            return lambda: None
        failure = int(driver.cudaHostRegister(begin, memory.nbytes, 0))
        if failure:
            warnings.warn(
                f"{self._info.id} cannot register {memory.nbytes} bytes of shared memory (CUDA "
                f"error {failure}): each message is copied once more; raise `ulimit -l`",
                stacklevel=2,
            )
            return lambda: None
        self._ends[begin] = begin + memory.nbytes

        def end() -> None:
            if self._ends.pop(begin, None) is not None:
                driver.cudaHostUnregister(begin)

        return end

    def tensor(self, array: Array) -> torch.Tensor | None:
        """Return an array in registered memory as a tensor; None for any other array."""
        if not self._ends or not array.flags.c_contiguous:
            return None
        begin = array.ctypes.data
        if any(lo <= begin and begin + array.nbytes <= hi for lo, hi in list(self._ends.items())):
            return torch.from_numpy(array)
        return None
