"""OpenCL pooling: overlapping, padded, dilated and adaptive windows, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from opencl_products import INTERPRETERS, OPENCL, check_close, on_device

aten = torch.ops.aten


@dataclass(frozen=True)
class Pool:
    x: tuple[int, ...]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil: bool = False

    @property
    def window(self) -> tuple[list[int], list[int], list[int]]:
        return list(self.kernel), list(self.stride), list(self.padding)


POOLS = {
    "2x2": Pool((2, 3, 8, 8), (2, 2), (2, 2)),
    "overlapping, ceil": Pool((2, 3, 9, 11), (3, 3), (2, 2), (1, 1), ceil=True),
    "uneven, dilated": Pool((1, 2, 10, 7), (3, 2), (2, 1), (1, 1), (2, 2)),
    "no batch": Pool((3, 7, 7), (3, 3), (1, 1), (1, 1)),
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def max_pool(pool: Pool) -> Any:
    return lambda x: aten.max_pool2d_with_indices(x, *pool.window, list(pool.dilation), pool.ceil)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("device_id", OPENCL)
def test_max_pool(device_id: str, name: str) -> None:
    pool = POOLS[name]
    x = random(*pool.x)
    check_close(device_id, max_pool(pool), (x,), 0)
    y, index = max_pool(pool)(x)
    check_close(
        device_id,
        lambda dy, x, index: aten.max_pool2d_with_indices_backward(
            dy, x, *pool.window, list(pool.dilation), pool.ceil, index
        ),
        (random(*y.shape), x, index),
        16,
    )


@pytest.mark.parametrize("device_id", OPENCL)
def test_max_pool_returns_the_first_maximum_and_nan(device_id: str) -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 3, 2] = torch.nan
    y, index = on_device(device_id, max_pool(Pool((1, 1, 4, 4), (2, 2), (2, 2))), (x,))
    assert index.flatten().tolist() == [0, 2, 8, 14]
    assert y.isnan().flatten().tolist() == [False, False, False, True]


@pytest.mark.wide
@pytest.mark.parametrize("divisor", [None, 5])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("device_id", OPENCL)
def test_avg_pool(device_id: str, name: str, include: bool, divisor: int | None) -> None:
    pool = POOLS[name]
    rest = (*pool.window, pool.ceil, include, divisor)
    x = random(*pool.x)
    check_close(device_id, lambda x: aten.avg_pool2d(x, *rest), (x,), 16)
    dy = random(*aten.avg_pool2d(x, *rest).shape)
    check_close(device_id, lambda dy, x: aten.avg_pool2d_backward(dy, x, *rest), (dy, x), 16)


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (7, 5), (10, 13)], ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_adaptive_avg_pool(device_id: str, size: tuple[int, int]) -> None:
    x = random(2, 3, 9, 7)
    check_close(device_id, lambda x: aten._adaptive_avg_pool2d(x, list(size)), (x,), 16)
    dy = random(2, 3, *size)
    check_close(device_id, aten._adaptive_avg_pool2d_backward.default, (dy, x), 16)


@pytest.mark.parametrize("device_id", INTERPRETERS)
def test_interpreted(device_id: str) -> None:
    check_close(device_id, max_pool(POOLS["no batch"]), (random(3, 7, 7),), 0)
    check_close(device_id, aten._adaptive_avg_pool2d_backward.default,
                (random(1, 2, 3, 2), random(1, 2, 5, 5)), 16)  # fmt: skip
