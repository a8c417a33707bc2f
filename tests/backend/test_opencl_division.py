"""Divisions that round, remainders, and other functions at numbers that often go wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import fetch
from opencl_devices import IDS, compiled, opencl_device, results, upload

pytestmark = [pytest.mark.wide, pytest.mark.parametrize("device_id", IDS)]
ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 2.5, -2.5, 7.0, 35.0, 0.7)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8")


def rounded(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    floor = torch.div(a, b, rounding_mode="floor")
    trunc = torch.div(a, b, rounding_mode="trunc")
    return floor, trunc, torch.remainder(a, b), torch.fmod(a, b)


def same(array: Any, tensor: torch.Tensor) -> None:
    """Check that both are equal, including the sign of zeros."""
    np.testing.assert_array_equal(array, tensor.numpy())
    if array.dtype.kind == "f":
        signs = np.signbit(array) == torch.signbit(tensor).numpy()
        assert (signs | np.isnan(array)).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floats(device_id: str, dtype: str) -> None:
    """Floor division may be one too large if the quotient is rounded up, as in 1 / 0.1."""
    device = opencl_device(device_id)
    if dtype not in device.info.dtypes:
        pytest.skip(f"no {dtype}")
    pairs = torch.tensor(list(itertools.product(ODD, ODD)), dtype=getattr(torch, dtype))
    a, b = pairs.unbind(1)
    for array, tensor in zip(results(device, rounded, a, b), rounded(a, b), strict=True):
        same(array, tensor)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(device_id: str, dtype: str) -> None:
    """The smallest integer by -1, and any integer by 0, may end the process.

    torch does end in the first case, so the expected results are of a division by 1: in integers
    that wrap, -min is min.
    """
    kind = getattr(torch, dtype)
    limits = torch.iinfo(kind)
    signed = (-1, -3, -100) if limits.min else (200, 255)
    numbers = (limits.min, limits.max, 0, 1, 3, 7, 100, *signed)
    pairs = torch.tensor([(a, b) for a in numbers for b in numbers if b], dtype=kind)
    a, b = pairs.unbind(1)
    harmless = torch.where((a == limits.min) & (b == -1), 1, b) if limits.min else b
    device = opencl_device(device_id)
    executable = compiled(device, rounded, a, harmless)
    buffers, events = upload(device, a, b)
    outputs, event, _ = executable.run(buffers, after=events)
    for buffer, tensor in zip(outputs, rounded(a, harmless), strict=True):
        same(fetch(device, buffer, [event]), tensor)


HUGE = torch.tensor([1e-8, 0.5, -1.0, 3e38, 2.0, 1e5, math.inf, 1e-40, math.nan, 1.0] * 5)


def test_sines_beside_large_numbers(device_id: str) -> None:
    """PoCL's vector sin, cos and tan are wrong for small numbers beside a large one."""

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sin(x), torch.cos(x), torch.tan(x)

    wide = fn(HUGE.double())
    for array, tensor in zip(results(opencl_device(device_id), fn, HUGE), wide, strict=True):
        np.testing.assert_allclose(array, tensor.numpy(), rtol=2e-6, atol=1e-38)


def test_powers_of_doubles_beside_large_ones(device_id: str) -> None:
    """PoCL's vector pow is wrong for some doubles beside others."""
    device = opencl_device(device_id)
    if "float64" not in device.info.dtypes:
        pytest.skip("no float64")
    x, y = HUGE.double().abs(), HUGE.double().flip(0).roll(3)
    (array,) = results(device, torch.pow, x, y)
    np.testing.assert_allclose(array, torch.pow(x, y).numpy(), rtol=1e-13)


BOUNDS: dict[str, Callable[..., torch.Tensor]] = {
    "clamp": lambda x, low: torch.clamp(x, low, low + 1),
    "the end of an interpolation": lambda x, low: torch.lerp(x, low * 1e8, torch.ones_like(x)),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_with_nan(device_id: str, name: str) -> None:
    x = torch.tensor([1.0, math.nan, -2.0, 0.25, math.inf])
    low = torch.tensor([math.nan, 0.0, -1.0, 0.5, 2.0])
    (array,) = results(opencl_device(device_id), BOUNDS[name], x, low)
    np.testing.assert_array_equal(array, BOUNDS[name](x, low).numpy())


SMALL: dict[str, Callable[[torch.Tensor], Any]] = {
    "masked_fill": lambda x: x.masked_fill(x > 0, 1),
    "where": lambda x: torch.where(x > 1, x, 0),
    "any and all": lambda x: (x.any(), x.all(), x.any(-1), x.all(-1)),
    "extremes": lambda x: (*x.max(-1), *x.min(-1), x.amax()),
    "running": lambda x: torch.cummin(x, -1),
    "nothing there": lambda x: torch.where(x == x, x, x * 0),
}


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool", "float64"])
@pytest.mark.parametrize("name", SMALL)
def test_one_element_and_small_integers(device_id: str, name: str, dtype: str) -> None:
    """A value shared by a whole row is a scalar in C, whose literals have few types."""
    device = opencl_device(device_id)
    if dtype not in device.info.dtypes:
        pytest.skip(f"no {dtype}")
    several = torch.tensor([[3, 1, 2, 0, 31], [0, 0, 0, 0, 0]]).to(getattr(torch, dtype))
    for x in (several[0, 0].clone(), several):
        expected = SMALL[name](x)
        expected = expected if isinstance(expected, tuple) else (expected,)
        for array, tensor in zip(results(device, SMALL[name], x), expected, strict=True):
            assert array.dtype.name == str(tensor.dtype)[6:]
            np.testing.assert_array_equal(array, tensor.numpy())
