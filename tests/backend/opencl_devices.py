"""OpenCL devices, and functions that run a function of torch on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from found_devices import Array, fetch, infos, opened, trace
from hetpipe.backends.opencl.device import OpenCLDevice

from hetpipe.sdk.backend import Buffer, Event
from hetpipe.sdk.host.registry import get_backend

IDS = [info.id for info in infos() if info.backend == "opencl"]


def opencl_device(device_id: str) -> OpenCLDevice:
    """Return the open device; a process opens it once."""
    device = opened(device_id)
    assert isinstance(device, OpenCLDevice)
    return device


def opened_here(device_id: str) -> OpenCLDevice:
    """Open the device again, in this thread.

    Oclgrind's check for uninitialised reads crashes outside the thread that made the context, and
    `open_device` makes it in another thread.
    """
    backend = get_backend("opencl")
    device = backend.open(next(info for info in backend.discover() if info.id == device_id))
    assert isinstance(device, OpenCLDevice)
    return device


def compiled(device: OpenCLDevice, fn: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """Compile `fn` for the shapes of `inputs`."""
    return device.compile(trace(fn, inputs, get_backend("opencl").decompositions()))


def upload(device: OpenCLDevice, *inputs: torch.Tensor) -> tuple[list[Buffer], list[Event]]:
    """Start uploads; return the buffers, and the events that end when the buffers are filled."""
    pairs = [device.upload(tensor.numpy()) for tensor in inputs]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def results(device: OpenCLDevice, fn: Callable[..., Any], *inputs: torch.Tensor) -> list[Array]:
    """Return the outputs of `fn` on the device."""
    buffers, events = upload(device, *inputs)
    outputs, event, _ = compiled(device, fn, *inputs).run(buffers, after=events)
    return [fetch(device, buffer, [event]) for buffer in outputs]


def close_to_torch(
    device: OpenCLDevice, fn: Callable[..., Any], *inputs: torch.Tensor, ulps: float = 64
) -> None:
    """Compare `fn` on the device with torch in float64, relative to the largest element."""
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    expected = fn(*wide)
    expected = expected if isinstance(expected, (tuple, list)) else [expected]
    found = results(device, fn, *inputs)
    assert len(found) == len(expected)
    for array, tensor in zip(found, expected, strict=True):
        want = tensor.numpy()
        assert array.shape == want.shape
        if array.dtype.kind != "f":
            np.testing.assert_array_equal(array, want)
        else:
            scale = max(1.0, float(np.abs(want).max(initial=0)))
            np.testing.assert_allclose(array, want, rtol=0, atol=ulps * 2.0**-23 * scale)
