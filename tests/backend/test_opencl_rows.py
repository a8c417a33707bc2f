"""OpenCL kernels over rows: several rows per work-item, and results that bypass the caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from found_devices import trace
from hetpipe.backends.opencl.lower.lowering import lower
from hetpipe.backends.opencl.lower.target import PAST_CACHES
from opencl_devices import close_to_torch, opencl_device, results
from opencl_products import OPENCL

aten = torch.ops.aten
LENGTHS = [5, 16, 33, 64, 70, 96, 130]
WHOLE_LINES = [16, 48, 64, 80, 4096, 4112]
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: aten._softmax(x, 1, False),
    "log_softmax": lambda x: aten._log_softmax(x, 1, False),
    "layer_norm": lambda x: aten.native_layer_norm(x, [x.shape[1]], None, None, 1e-5)[0],
}
ROWS = 300
"""Enough for several rows per work-item on a device with few compute units."""


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 3


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("device_id", OPENCL)
def test_a_rows_result_does_not_depend_on_its_position(
    device_id: str, name: str, length: int
) -> None:
    """Equal rows have equal results, bit for bit.

    A work-item reads its first row separately, and every other row while it computes the previous
    one.
    """
    device = opencl_device(device_id)
    rows = random(1, length).repeat(ROWS, 1)
    close_to_torch(device, FUNCTIONS[name], rows)
    (found,) = results(device, FUNCTIONS[name], rows)
    assert (found == found[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("length", WHOLE_LINES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("device_id", OPENCL)
def test_large_results_bypass_the_caches(device_id: str, name: str, length: int) -> None:
    """The caches are declared to be tiny."""
    device = opencl_device(device_id)
    large, x = device.target, random(7, length)
    device.target = replace(large, last_cache_nbytes=64)
    try:
        (launch,) = lower(trace(FUNCTIONS[name], (x,), {}), device.target).launches
        processor = large.kind == large.family == "cpu"
        kept = name == "log_softmax" or (name == "softmax" and length > 4096)
        assert (f"-D{PAST_CACHES}" in launch.kernel.options) == (processor and not kept)
        close_to_torch(device, FUNCTIONS[name], x)
    finally:
        device.target = large


@pytest.mark.parametrize("device_id", OPENCL)
def test_results_that_fit_the_caches_use_them(device_id: str) -> None:
    target = opencl_device(device_id).target
    for rows, length in ((64, 64), (1 << 14, 1 << 10 | 1)):  # the last has no whole lines
        x = torch.empty(rows, length)
        (launch,) = lower(trace(FUNCTIONS["softmax"], (x,), {}), target).launches
        assert not launch.kernel.options
