"""Reductions over every set of dimensions, short and long, alone and fused with their inputs."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch
from opencl_devices import IDS, close_to_torch, opencl_device, results

pytestmark = pytest.mark.parametrize("device_id", IDS)

DIMS = [dims for n in (1, 2, 3) for dims in combinations(range(3), n)]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.wide
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 37), (5, 33, 2), (1, 6, 130)], ids=str)
def test_dims(device_id: str, shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    close_to_torch(
        opencl_device(device_id),
        lambda a: (
            a.sum(dims), a.mean(dims, keepdim=True), a.amax(dims), a.amin(dims, keepdim=True),
            a.var(dims, unbiased=False), (a > 3).any(dims[0]),
        ),
        normal(*shape),
    )  # fmt: skip


@pytest.mark.wide
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2, 1)], ids=str)
@pytest.mark.parametrize("shape", product((1, 3), (1, 4), (1, 5)), ids=str)
def test_dimensions_of_size_1(
    device_id: str, shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    """Dimensions of size 1 cause no loop at any position."""

    def each(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        moved = a.permute(order)
        return tuple(reduced for dims in DIMS for reduced in (moved.sum(dims), moved.amax(dims)))

    close_to_torch(opencl_device(device_id), each, normal(*shape))


@pytest.mark.slow
def test_reductions_of_views_and_products(device_id: str) -> None:
    close_to_torch(
        opencl_device(device_id),
        lambda a, b: (
            (a * b).sum((0, 2)), (a.permute(2, 0, 1) - 1).sum(0), a[:, 1:, ::3].exp().mean((1, 2)),
            (a * a).sum(), a.expand(2, 4, 5, 33).sum((0, 3)), (a > b).sum(2),
        ),
        normal(4, 5, 33),
        normal(5, 33),
    )  # fmt: skip


@pytest.mark.slow
def test_indices_of_extreme_elements(device_id: str) -> None:
    x = torch.tensor([[1.0, 5.0, 5.0, 2.0], [7.0, -1.0, 7.0, 7.0], [0.0, 0.0, 0.0, 0.0]])
    close_to_torch(
        opencl_device(device_id),
        lambda a: (a.argmax(1), a.argmin(0), a.argmax(), *torch.max(a, 1), *torch.min(a, 0)),
        x,
    )


@pytest.mark.wide
@pytest.mark.parametrize("shape", [(70001,), (5003, 20), (20, 5003), (2, 9, 4099)], ids=str)
def test_long_reductions_are_exact_and_reproducible(device_id: str, shape: tuple[int, ...]) -> None:
    device = opencl_device(device_id)
    if device.info.capabilities.reference:
        pytest.skip("an interpreter: small shapes only")
    x = normal(*shape) + 1

    def fn(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a.sum(), a.sum(0), a.sum(-1), a.var(0, unbiased=False)

    wide = [t.numpy() for t in fn(x.double())]
    first, second = results(device, fn, x), results(device, fn, x)
    for once, twice, want in zip(first, second, wide, strict=True):
        np.testing.assert_array_equal(once, twice)
        np.testing.assert_allclose(once, want, rtol=3e-6, atol=1e-4 if want.ndim else 0)


def test_reductions_of_empty_tensors(device_id: str) -> None:
    close_to_torch(
        opencl_device(device_id),
        lambda a: (a.sum(0), a.sum(1), a.sum(), a.prod(1), (a + 1).t()),
        torch.empty(0, 4),
    )


def test_long_sums_of_short_rows_are_cut_into_segments(device_id: str) -> None:
    """One chain of all 30,000 additions would be off by 1.9e-4."""
    device = opencl_device(device_id)
    if device.info.capabilities.reference:
        pytest.skip("an interpreter: small shapes only")
    x = torch.full((10000, 8), 0.1)
    (total,) = results(device, lambda x: (x[:, :3].sum(),), x)
    np.testing.assert_allclose(total, 30000 * x[0, 0].double(), rtol=3e-5)
