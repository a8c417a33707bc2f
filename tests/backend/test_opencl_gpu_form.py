"""The form of kernels that GPUs get, one element per work-item, run on whatever device is here."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from found_devices import infos
from hetpipe.backends.opencl.device import OpenCLDevice
from opencl_devices import IDS, close_to_torch, results

from hetpipe.sdk.operators import keep_mask
from hetpipe.sdk.registry import get_backend

pytestmark = pytest.mark.parametrize("device_id", IDS)


@cache
def as_gpu(device_id: str) -> OpenCLDevice:
    """The device, taken for a GPU."""
    (info,) = (info for info in infos() if info.id == device_id)
    device = get_backend("opencl").open(replace(info, kind="gpu"))
    assert isinstance(device, OpenCLDevice)
    return device


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(11))


def test_elementwise_and_views(device_id: str) -> None:
    close_to_torch(
        as_gpu(device_id),
        lambda a, b: (
            torch.tanh(a) * b + 1, a.t().reshape(9, 35) * 2, torch.cat([a, a - b], 1),
            torch.nn.functional.gelu(a), a[2:, ::3].flip(1),
        ),
        normal(35, 9),
        normal(9),
    )  # fmt: skip


def test_reductions(device_id: str) -> None:
    close_to_torch(
        as_gpu(device_id),
        lambda a: (a.sum(), a.sum(0), a.mean(2), a.amax((0, 2)), a.var((0, 2)), a.argmax(1)),
        normal(7, 5, 33),
    )


def test_embedding_and_its_gradient(device_id: str) -> None:
    index = torch.tensor([[1, 4, 1], [0, 4, 4]])
    close_to_torch(
        as_gpu(device_id),
        lambda t, g, i: (
            torch.nn.functional.embedding(i, t) * 2,
            torch.ops.aten.embedding_dense_backward(g, i, 5, -1, False),
        ),
        normal(5, 19),
        normal(2, 3, 19),
        index,
    )


def test_masks(device_id: str) -> None:
    rng = torch.tensor([17, 2, 9])

    def fn(words: torch.Tensor) -> torch.Tensor:
        return keep_mask(words, 1, [4, 5, 6], 0.5, 0, 2)

    np.testing.assert_array_equal(results(as_gpu(device_id), fn, rng)[0], fn(rng).numpy())
