"""Dtypes, strides and empty tensors that were wrong in random comparisons with torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import run
from opencl_devices import IDS, close_to_torch, opencl_device
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten

pytestmark = [pytest.mark.wide, pytest.mark.parametrize("device_id", IDS)]
Function = Callable[..., Any]

EXACT = 2.0**-25
"""A few units in the last place of float64, counted in units of float32."""
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", [*WHOLE, torch.bool])
def test_signs_of_integers(device_id: str, dtype: torch.dtype) -> None:
    """The sign of an unsigned 1 is not 255, and its sign bit can be computed."""
    x = torch.arange(37) % 5 if dtype in (torch.uint8, torch.bool) else torch.arange(37) - 18
    fn: Function = lambda x: (torch.sign(x), torch.sgn(x), torch.signbit(x))  # noqa: E731
    close_to_torch(opencl_device(device_id), fn, x.to(dtype))


def test_a_slope_by_keyword(device_id: str) -> None:
    """The slope counts also if the graph passes it by keyword."""
    x = torch.linspace(-2, 2, 9)
    graph = make_fx(lambda x: (aten.leaky_relu.default(x, 0.3),))(x)
    node = next(node for node in graph.graph.nodes if node.op == "call_function")
    node.args, node.kwargs = node.args[:1], {"negative_slope": 0.3}
    (output,) = run(opencl_device(device_id), graph, [x.numpy()])
    np.testing.assert_array_equal(output, torch.nn.functional.leaky_relu(x, 0.3).numpy())


BINARY: dict[str, Function] = {
    "pow": lambda x, y: x.abs() ** y,
    "power of a number": lambda x, y: 0.5**x,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
}


@pytest.mark.parametrize("name", BINARY)
def test_doubles_one_by_one(device_id: str, name: str) -> None:
    """Rows with fewer than 16 elements must not use the functions for floats."""
    device = opencl_device(device_id)
    if "float64" not in device.info.dtypes:
        pytest.skip("no doubles")
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 7, 9, generator=generator, dtype=torch.float64)
    fn = BINARY[name]
    close_to_torch(device, lambda x, y: fn(x[:, 2:7], y[:, 2:7]), x, y, ulps=EXACT)


SPECIAL: dict[str, tuple[Function, list[float]]] = {
    "digamma": (torch.digamma, [0.3, 0.5, 1.0, 1.46, 2.0, 7.3, -0.3, -2.7]),
    "erfinv": (torch.erfinv, [0.0, 0.3, -0.45, 0.53, -0.53, 0.69, -0.71, 0.9, -0.999]),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_functions_of_doubles(device_id: str, name: str) -> None:
    device = opencl_device(device_id)
    if "float64" not in device.info.dtypes:
        pytest.skip("no doubles")
    fn, values = SPECIAL[name]
    close_to_torch(device, fn, torch.tensor(values, dtype=torch.float64), ulps=EXACT)


RUNNING: dict[str, Function] = {
    name: lambda x, name=name: getattr(torch, name)(x, 1)
    for name in ("cummax", "cummin", "cumsum", "cumprod", "logcumsumexp")
}


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
@pytest.mark.parametrize("name", RUNNING)
def test_running_results_of_empty_tensors(
    device_id: str, name: str, shape: tuple[int, ...]
) -> None:
    close_to_torch(opencl_device(device_id), RUNNING[name], torch.ones(shape))


@pytest.mark.parametrize("index", [-1, [0, -1], [[3]]])
def test_take(device_id: str, index: Any) -> None:
    """Tracing must not read the value of an index with one element."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    close_to_torch(opencl_device(device_id), torch.take, x, torch.tensor(index))


@pytest.mark.slow
def test_a_diagonal_of_another_dtype(device_id: str) -> None:
    fn: Function = lambda x, d: x.diagonal_scatter(d)  # noqa: E731
    close_to_torch(opencl_device(device_id), fn, torch.ones(3, 4) > 0, torch.tensor([0, 1, 0]))
