"""The devices of this machine, each opened once, and functions that run graphs on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.sdk.backend import Buffer, Device, Event, Executable
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.host.registry import discover_devices, open_device
from hetpipe.sdk.info import DeviceInfo

Array = np.ndarray[Any, Any]
WAIT_S = 300

opened = functools.cache(open_device)


@functools.cache
def infos() -> tuple[DeviceInfo, ...]:
    """Return all devices of all backends that can be loaded."""
    return tuple(discover_devices()[0])


def trace(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], table: Any) -> fx.GraphModule:
    """Return the canonical graph of a function that returns a tensor or a tuple of tensors."""

    def flat(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = fn(*args)
        results = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(item for item in results if item is not None)

    graph = make_fx(flat, decomposition_table=dict(table))(*inputs)
    for node in graph.graph.nodes:
        assert node.op != "get_attr", f"{node.target} is a constant: pass it as an input"
    graph.graph.eliminate_dead_code()
    return canonical(graph)


def put(device: Device, array: Array) -> Buffer:
    """Upload an array and wait for the copy."""
    buffer, event = device.upload(array)
    event.wait(WAIT_S)
    return buffer


def fetch(device: Device, buffer: Buffer, after: Sequence[Event] = ()) -> Array:
    """Download a buffer once the events have ended."""
    for event in after:
        event.wait(WAIT_S)
    array = np.empty(buffer.shape, buffer.dtype)
    device.download(buffer, array).wait(WAIT_S)
    return array


def execute(
    device: Device,
    executable: Executable,
    inputs: Sequence[Array],
    donate: frozenset[int] = frozenset(),
) -> list[Array]:
    """Upload the inputs, run, and download the outputs."""
    buffers = [put(device, array) for array in inputs]
    outputs, event, _ = executable.run(buffers, donate)
    return [fetch(device, buffer, [event]) for buffer in outputs]


def run(
    device: Device,
    graph: fx.GraphModule,
    inputs: Sequence[Array],
    donate: frozenset[int] = frozenset(),
) -> list[Array]:
    """Compile a graph and execute it."""
    return execute(device, device.compile(graph), inputs, donate)
