"""Devices for tests: every one found here, opened once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.registry import discover_devices, open_device

Array = np.ndarray[Any, Any]

opened = functools.cache(open_device)


@functools.cache
def infos() -> tuple[DeviceInfo, ...]:
    """All devices of all backends that load here."""
    return tuple(discover_devices()[0])


def trace(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], table: Any) -> fx.GraphModule:
    """The canonical graph of a function of tensors that returns a tensor or a tuple of them."""

    def flat(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = fn(*args)
        found = result if isinstance(result, (tuple, list)) else (result,)
        return tuple(item for item in found if item is not None)

    graph = make_fx(flat, decomposition_table=dict(table))(*inputs)
    _read_constants_as_inputs(graph)
    graph.graph.eliminate_dead_code()
    return canonical(graph)


def _read_constants_as_inputs(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        assert node.op != "get_attr", f"{node.target} is a constant: pass it as an input"


def run(
    device: Device,
    graph: fx.GraphModule,
    inputs: Sequence[Array],
    donate: frozenset[int] = frozenset(),
) -> list[Array]:
    """Upload, run, download."""
    buffers = []
    for array in inputs:
        buffer, event = device.upload(array)
        event.wait(60)
        buffers.append(buffer)
    outputs, event, _ = device.compile(graph).run(buffers, donate)
    event.wait(300)
    arrays = []
    for buffer in outputs:
        array = np.empty(buffer.shape, buffer.dtype)
        device.download(buffer, array).wait(60)
        arrays.append(array)
    return arrays
