"""Fixed small graphs that the profiler runs beside layers, and the bytes that it passes over."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.backend import Buffer, Device, Executable
from hetpipe.sdk.graph import canonical

PIECE = 1 << 20  # bytes
PIECES = 32


def compiled(device: Device, operator: Any, *shapes: tuple[int, ...]) -> Executable | None:
    """An operator on float32 tensors of these shapes, compiled; None if the device lacks it.

    The graph is not traced: workers may be threads, and only one thread may trace.
    """
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(len(shapes))]
    for node, shape in zip(inputs, shapes, strict=True):
        node.meta["val"] = torch.empty(shape, device="meta")
    call = graph.call_function(operator, tuple(inputs))
    call.meta["val"] = operator(*(node.meta["val"] for node in inputs))
    graph.output((call,))
    try:
        return device.compile(canonical(graph))
    except UnsupportedOperatorError:
        return None


def filled(device: Device, shape: tuple[int, ...]) -> Buffer:
    """A buffer on the device, of small numbers."""
    buffer, event = device.upload(np.full(shape, 0.5, np.float32))
    event.wait()
    return buffer


class Stirrer:
    """Reads and writes bytes on a device, so that they and not others are in its caches."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._executable: Executable | None = None
        self._ring: list[Buffer] = []
        self._next = 0

    def pass_over(self, nbytes: int) -> None:
        """Read and write about this number of bytes, in whole pieces; nothing below one."""
        for _ in range(nbytes // PIECE):
            if not self._ring:
                shape = (PIECE // 4,)
                self._executable = compiled(self._device, torch.ops.aten.neg.default, shape)
                self._ring = [filled(self._device, shape) for _ in range(PIECES)]
            if self._executable is None:  # the device cannot: caches stay as they are
                return
            _, event, _ = self._executable.run([self._ring[self._next]])
            event.wait()
            self._next = (self._next + 1) % PIECES
