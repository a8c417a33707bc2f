"""Small fixed graphs that the profiler runs beside layers, and a pass over the caches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import fx

from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.backend import Buffer, Device, Executable
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.host.validation import check_ran, check_uploaded

PIECE = 1 << 20  # bytes
PIECES = 32

Shape = tuple[int, ...]


def compile_operator(device: Device, operator: Any, count: int, shape: Shape) -> Executable | None:
    """Compile an operator on `count` float32 tensors of a shape, with a result of that shape.

    Returns None if the device lacks the operator.
    """
    try:
        return device.compile(graph_of(operator, count, shape))
    except UnsupportedOperatorError:
        return None


def graph_of(operator: Any, count: int, shape: Shape) -> fx.GraphModule:
    """Return the graph of an operator on `count` float32 tensors, with a result of their shape.

    It is not traced, because workers may be threads, and only one thread may trace. Nor does torch
    infer the result's shape: that would import its compilers, for two seconds.
    """
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(count)]
    call = graph.call_function(operator, tuple(inputs))
    for node in (*inputs, call):
        node.meta["val"] = torch.empty(shape, device="meta")
    graph.output((call,))
    return canonical(graph)


def filled_buffer(device: Device, shape: Shape) -> Buffer:
    """Return a buffer on the device, filled with small numbers."""
    buffer, event = check_uploaded(device, device.upload(np.full(shape, 0.5, np.float32)))
    event.wait()
    return buffer


class Stirrer:
    """Reads and writes bytes on a device, so that they replace other bytes in its caches."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._executable: Executable | None = None
        self._ring: list[Buffer] = []
        self._next = 0

    def pass_over(self, nbytes: int) -> None:
        """Read and write about this number of bytes, in whole pieces; nothing below one piece."""
        for _ in range(nbytes // PIECE):
            if not self._ring:
                shape = (PIECE // 4,)
                self._executable = compile_operator(
                    self._device, torch.ops.aten.neg.default, 1, shape
                )
                self._ring = [filled_buffer(self._device, shape) for _ in range(PIECES)]
            if self._executable is None:  # the device cannot: the caches do not change
                return
            ran = self._executable.run([self._ring[self._next]])
            _, event, _ = check_ran(self._device, ran, 1)
            event.wait()
            self._next = (self._next + 1) % PIECES
