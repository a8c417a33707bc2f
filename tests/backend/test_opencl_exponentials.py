"""The exponential and the normal distribution function of generated kernels, against float64.

The sizes are odd, so that both vectors of 16 and single elements are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from found_devices import trace
from hetpipe.backends.opencl.lower.launch import with_helpers
from hetpipe.backends.opencl.lower.lowering import lower
from opencl_devices import IDS, Array, opencl_device, results

from hetpipe.sdk.host.registry import get_backend

pytestmark = pytest.mark.parametrize("device_id", IDS)

UNUSUAL = (0.0, -0.0, 1e-30, -1e-30, 1e-8, 1e30, -1e30, 3e38, math.inf, -math.inf, math.nan)


def numbers(low: float, high: float, *more: float) -> torch.Tensor:
    """Return 16 n + 5 numbers: a range, numbers that are often wrong, and `more`."""
    few = torch.tensor([*UNUSUAL, *more])
    count = 2048 + 5 - len(few)
    return torch.cat([torch.linspace(low, high, count), few])


def run(device_id: str, fn: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Array:
    """Return the only result of `fn` on the device, in float64."""
    device = opencl_device(device_id)
    (result,) = results(device, fn, *inputs)
    return np.asarray(result, np.float64)


def assert_close(actual: Array, exact: Array, allowed: Array | float) -> None:
    """Check that infinities and NaN are in place and all other numbers within `allowed`."""
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(actual[~finite], exact[~finite])
    error = np.abs(actual[finite] - exact[finite])
    assert (error <= np.broadcast_to(allowed, exact.shape)[finite]).all(), error.max()


def test_exponential_is_within_2_ulp(device_id: str) -> None:
    # The extra numbers are near the subnormal numbers, near zero results, and beside infinity.
    x = numbers(-104, 88.7, -87.33, -87.4, -103.9, 88.72283, 88.72285, 89.0, 128.0)
    with np.errstate(over="ignore"):
        exact = np.exp(x.double().numpy())
        rounded = exact.astype(np.float32)
    exact[np.isinf(rounded)] = np.inf
    assert_close(run(device_id, torch.exp, x), exact, 2 * np.spacing(rounded).astype(np.float64))


def cdf(x: Array) -> Array:
    return np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)))(x)


def test_distribution_function_is_exact_at_large_numbers(device_id: str) -> None:
    x = numbers(-7, 7, 5.6, -5.6, 5.7, -5.7, 13.0, -13.0)
    actual = run(device_id, lambda a: (torch.erf(a * math.sqrt(0.5)) + 1) * 0.5, x)
    wide = x.double().numpy()
    assert_close(actual, cdf(wide), 1.5e-7)
    beyond = np.abs(wide) > 14
    np.testing.assert_array_equal(actual[beyond], (wide > 0)[beyond])


def test_error_function_alone_keeps_2_ulp(device_id: str) -> None:
    x = numbers(-5, 5)
    exact = np.vectorize(math.erf)(x.double().numpy())
    spacing = np.abs(np.spacing(exact.astype(np.float32))).astype(np.float64)
    assert_close(run(device_id, torch.erf, x), exact, 2 * spacing)


def test_gelu_is_no_worse_than_its_factors(device_id: str) -> None:
    x = torch.linspace(-12, 12, 2053)
    wide = x.double().numpy()
    actual = run(device_id, torch.nn.functional.gelu, x)
    assert_close(actual, wide * cdf(wide), 1.5e-7 * np.maximum(1, np.abs(wide)))
    assert np.abs(actual[wide < 0] - (wide * cdf(wide))[wide < 0]).max() <= 1.5e-7


def test_gelu_of_small_and_unusual_numbers(device_id: str) -> None:
    x = numbers(-1, 1, 1e-3, -1e-3, 1e-40, -1e-40, 13.0, -13.0)
    exact = x.double().numpy()
    with np.errstate(invalid="ignore"):
        exact = exact * cdf(exact)
    exact[np.isneginf(x.numpy())] = 0  # the limit
    allowed = np.maximum(6e-7 * np.abs(exact), 1e-16)
    assert_close(run(device_id, torch.nn.functional.gelu, x), exact, allowed)


def test_gelu_of_doubles(device_id: str) -> None:
    device = opencl_device(device_id)
    if "float64" not in device.info.dtypes:
        pytest.skip(f"{device_id} has no doubles")
    x = torch.linspace(-12, 12, 2053, dtype=torch.float64)
    exact = x.numpy() * cdf(x.numpy())
    (actual,) = results(device, torch.nn.functional.gelu, x)
    np.testing.assert_allclose(actual, exact, rtol=1e-13, atol=1e-300)


def test_gradient_of_gelu(device_id: str) -> None:
    x, dy = torch.linspace(-12, 12, 2053), torch.linspace(0.5, 2, 2053)
    wide = x.double().numpy()
    slope = cdf(wide) + wide * np.exp(-wide * wide / 2) / math.sqrt(2 * math.pi)
    actual = run(device_id, torch.ops.aten.gelu_backward.default, dy, x)
    assert_close(actual, dy.double().numpy() * slope, 6e-7)


def test_gradient_of_gelu_by_tanh(device_id: str) -> None:
    x, dy = torch.linspace(-12, 12, 2053), torch.linspace(0.5, 2, 2053)
    derivative = torch.ops.aten.gelu_backward.default

    def by_tanh(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return derivative(dy, x, approximate="tanh")

    exact = by_tanh(dy.double(), x.double()).numpy()
    assert_close(run(device_id, by_tanh, dy, x), exact, 5e-6)


def test_gelu_and_its_derivative_share_one_exponential(device_id: str) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.gelu(x), torch.ops.aten.gelu_backward.default(x, x)

    device = opencl_device(device_id)
    graph = trace(both, (torch.zeros(64),), get_backend("opencl").decompositions())
    (launch,) = lower(graph, device.target).launches
    assert launch.kernel.source.count("= exp_minus_square(") <= 2  # vectors and single elements
    assert "gelu(" not in launch.kernel.source


def test_gelu_without_its_derivative_uses_the_gelu_function(device_id: str) -> None:
    device = opencl_device(device_id)
    table = get_backend("opencl").decompositions()
    graph = trace(torch.nn.functional.gelu, (torch.zeros(64),), table)
    (launch,) = lower(graph, device.target).launches
    assert "= gelu(" in launch.kernel.source
    assert "exp_minus_square(" not in launch.kernel.source


def test_helpers_include_the_functions_they_call(device_id: str) -> None:
    text = with_helpers("float f(float x) { return exact_erf(x); }")
    assert text.index("exact_exp(const FLOAT") < text.index("exact_erf(const FLOAT")
    assert with_helpers(text) == text
