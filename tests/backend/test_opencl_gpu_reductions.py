"""Reductions for graphics cards: work-groups compute results together, long sums in segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hetpipe.backends.opencl.device import OpenCLDevice
from opencl_devices import IDS, close_to_torch, compiled, results
from test_opencl_gpu_form import as_gpu, is_interpreted, normal

pytestmark = pytest.mark.parametrize("device_id", IDS)


@pytest.fixture
def card(device_id: str, monkeypatch: pytest.MonkeyPatch) -> OpenCLDevice:
    """Return the device as a graphics card with many units, so that sums are cut early."""
    device = as_gpu(device_id)
    monkeypatch.setattr(device, "target", replace(device.target, compute_units=32))
    return device


SHAPES = [(3, 4, 37), (40, 2, 130), (2, 700, 3)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dimensions(card: OpenCLDevice, device_id: str, shape: tuple[int, ...]) -> None:
    if is_interpreted(device_id):
        shape = (shape[0], min(shape[1], 70), shape[2])

    def fn(a: torch.Tensor) -> list[torch.Tensor]:
        dims: list[Any] = [0, 1, 2, (0, 1), (1, 2), (0, 2), (0, 1, 2)]
        return [f(each) for each in dims for f in (a.sum, a.amax, (a * a - 1).mean)]

    close_to_torch(card, fn, normal(*shape))


def test_other_dtypes_and_extremes(card: OpenCLDevice) -> None:
    close_to_torch(
        card,
        lambda a: (
            (a > 2).any(1), (a < 9).all(0), (a > 0).sum(), a.argmax(1), a.argmin(0), a.var((0, 1)),
            (a * 0 + 1).prod(0), (a * 100).long().amin(1),
        ),
        normal(35, 70),
    )  # fmt: skip


def sizes(device: OpenCLDevice, fn: Callable[..., Any], *inputs: torch.Tensor) -> list[int]:
    """Return the work-groups of each launch; each group must have many work-items."""
    launches = compiled(device, fn, *inputs)._lowered.launches
    assert all(prod(launch.local_size) == device.target.group for launch in launches)
    return [prod(launch.global_size) // prod(launch.local_size) for launch in launches]


def test_a_full_sum_uses_many_groups_and_is_reproducible(
    card: OpenCLDevice, device_id: str
) -> None:
    x = normal(9, 5 if is_interpreted(device_id) else 70_001) + 1
    groups = sizes(card, torch.sum, x)
    if not is_interpreted(device_id):
        assert groups == [128, 1]
    (first,), (second,) = (results(card, torch.sum, x) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, x.double().sum().numpy(), rtol=1e-6)


def test_sums_of_columns_use_many_groups(card: OpenCLDevice, device_id: str) -> None:
    rows = 300 if is_interpreted(device_id) else 6000
    x = normal(rows, 96)
    groups = sizes(card, lambda a: a.sum(0), x)
    assert len(groups) == 2
    assert groups[0] >= min(126, 3 * (rows // 128))
    close_to_torch(card, lambda a: a.sum(0), x)


def test_sums_of_rows_divide_a_group_between_short_rows(card: OpenCLDevice) -> None:
    assert sizes(card, lambda a: a.sum(1), normal(64, 20)) == [2]  # 8 work-items for each row
    assert sizes(card, lambda a: a.sum(1), normal(512, 4)) == [2]  # a work-item for each row
