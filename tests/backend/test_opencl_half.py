"""float16 as input or output of a graph: devices without float16 arithmetic can still cast it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from opencl_devices import IDS, compiled, opencl_device, results

from hetpipe.errors import UnsupportedOperatorError

EXTREME = torch.tensor([0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 65504, 65520, 1e6, -1e6, 2e-8, 4e-8])
EXTREME = torch.cat([EXTREME, torch.tensor([torch.nan, torch.inf, 2**-14, 3e-5, 1e-7, 6e-8, 0.1])])
SHAPES = [(), (1,), (17,), (5, 7), (3, 16, 33), (64, 128)]


@pytest.fixture(params=IDS)
def device_id(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.wide
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_casts_round_as_torch_does(device_id: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape) * 100
    device = opencl_device(device_id)
    (narrow,) = results(device, lambda a: (a * 3).half(), x)
    np.testing.assert_array_equal(narrow, (x * 3).half().numpy())
    (wide,) = results(device, lambda a: a.float() * 3, x.half())
    np.testing.assert_array_equal(wide, (x.half().float() * 3).numpy())


def test_ties_subnormals_and_overflow(device_id: str) -> None:
    device = opencl_device(device_id)
    (narrow,) = results(device, lambda a: a.half(), EXTREME)
    np.testing.assert_array_equal(narrow, EXTREME.half().numpy())
    (wide,) = results(device, lambda a: a.float(), EXTREME.half())
    np.testing.assert_array_equal(wide, EXTREME.half().float().numpy())


def test_non_contiguous_elements(device_id: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(48, 40)
    device = opencl_device(device_id)
    (wide,) = results(device, lambda a: a.float().t() + 1, x.half())
    np.testing.assert_array_equal(wide, (x.half().float().t() + 1).numpy())
    (narrow,) = results(device, lambda a: a.t().contiguous().half(), x)
    np.testing.assert_array_equal(narrow, x.t().half().numpy())


def test_a_product_between_casts(device_id: str) -> None:
    """A stage receives float16, computes in float32 and returns float16."""
    torch.manual_seed(0)
    x, w, b = torch.randn(12, 20).half(), torch.randn(33, 20), torch.randn(33)

    def stage(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.linear(x.float(), w, b)).half()

    (found,) = results(opencl_device(device_id), stage, x, w, b)
    # float32 results that differ in their last bits may be rounded to neighbouring halves.
    np.testing.assert_allclose(found, stage(x, w, b).numpy(), rtol=0, atol=2.0**-11)


def test_a_cast_there_and_back_is_refused(device_id: str) -> None:
    """Kernels would not round the intermediate cast."""
    device = opencl_device(device_id)
    with pytest.raises(UnsupportedOperatorError, match="dtype float16"):
        compiled(device, lambda a: a.half().float() * 2, torch.arange(8.0))
