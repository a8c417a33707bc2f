"""Kernels in the form for GPUs, one element per work-item, on the devices of this machine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from as_gpu import AsGpu
from found_devices import infos
from hetpipe.backends.opencl.device import OpenCLDevice
from hetpipe.backends.opencl.gpu import tiles
from oclgrind import ORACLE, log_of
from opencl_devices import IDS, close_to_torch, compiled, results
from torch.nn import functional

from hetpipe.sdk.operators.random import keep_mask, uniform

pytestmark = pytest.mark.parametrize("device_id", IDS)


@cache
def as_gpu(device_id: str) -> OpenCLDevice:
    """Open the device as if it were a GPU."""
    info = next(info for info in infos() if info.id == device_id)
    device = AsGpu().open(replace(info, id=f"as-gpu{device_id[6:]}", kind="gpu"))
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


@pytest.mark.slow
def test_reductions(device_id: str) -> None:
    close_to_torch(
        as_gpu(device_id),
        lambda a: (a.sum(), a.sum(0), a.mean(2), a.amax((0, 2)), a.var((0, 2)), a.argmax(1)),
        normal(7, 5, 33),
    )


@pytest.mark.slow
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

    def fn(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        drawn = uniform(words, 1, [4, 5, 7], 0, 2)
        return (
            keep_mask(words, 1, [4, 5, 6], 0.5, 0, 2),
            keep_mask(words, 1, [4, 8], 0.5, 0, 2),
            drawn,
        )

    for found, expected in zip(results(as_gpu(device_id), fn, rng), fn(rng), strict=True):
        np.testing.assert_array_equal(found, expected.numpy())


def is_interpreted(device_id: str) -> bool:
    """Return whether the device is so slow that sums must be short; they have as many edges."""
    return "oclgrind" in device_id


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "depth", "cols"), [(1, 1, 1), (33, 70, 45), (64, 16, 64), (65, 300, 129), (3, 5, 400)]
)
def test_products(device_id: str, rows: int, depth: int, cols: int) -> None:
    if is_interpreted(device_id):
        depth = min(depth, 70)
    a, b = normal(rows, depth), normal(depth, cols)
    close_to_torch(as_gpu(device_id), lambda a, b: a @ b, a, b)
    close_to_torch(
        as_gpu(device_id), lambda a, b: a.t() @ b.t(), a.t().contiguous(), normal(cols, depth)
    )


@pytest.mark.slow
def test_products_in_batches_with_a_bias_that_is_broadcast(device_id: str) -> None:
    a, b = normal(3, 20, 35), normal(3, 40, 35)
    close_to_torch(as_gpu(device_id), lambda a, b: a @ b.transpose(1, 2), a, b)
    close_to_torch(
        as_gpu(device_id),
        lambda a, b, c: torch.baddbmm(c, a, b.transpose(1, 2), beta=0.5, alpha=2.0),
        a, b, normal(20, 1),
    )  # fmt: skip


@pytest.mark.slow
def test_long_sums_are_divided_and_reproducible(device_id: str) -> None:
    def gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
        return x.t() @ dy

    depth = 600 if is_interpreted(device_id) else 3000
    x, dy = normal(depth, 13), normal(depth, 17)
    device = as_gpu(device_id)
    assert len(compiled(device, gradient, x, dy)._lowered.launches) == 2
    close_to_torch(device, gradient, x, dy)
    first, second = (results(device, gradient, x, dy)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_the_kernel_of_a_product_computes_its_epilogue(device_id: str) -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return functional.gelu(torch.addmm(b, x, w.t())) + r

    inputs = normal(35, 20), normal(50, 20), normal(50), normal(35, 50)
    device = as_gpu(device_id)
    assert len(compiled(device, layer, *inputs)._lowered.launches) == 1
    close_to_torch(device, layer, *inputs)


def use_tiles(monkeypatch: pytest.MonkeyPatch, item: int) -> None:
    """Use only tiles with `item` elements of a work-item in each direction."""
    monkeypatch.setattr(tiles, "DEPTHS", {item: tiles.DEPTHS[item]})


def use_local_memory(monkeypatch: pytest.MonkeyPatch, device: OpenCLDevice, nbytes: int) -> None:
    target = replace(device.target, local_memory_nbytes=nbytes)
    monkeypatch.setattr(device, "target", target)


@pytest.mark.slow
@pytest.mark.parametrize("item", tiles.DEPTHS)
def test_products_by_tiles_of_every_size(
    device_id: str, item: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes end inside a tile and inside a step; vectors fit the first product's operands."""
    use_tiles(monkeypatch, item)
    device, small = as_gpu(device_id), is_interpreted(device_id)
    for rows, depth, cols in [(4, 20, 8)] if small else [(132, 36, 68), (65, 37, 131)]:
        a, b = normal(rows, depth), normal(depth, cols)
        for nbytes in (17 << 10, 1 << 17):  # one step in local memory, or two
            use_local_memory(monkeypatch, device, nbytes)
            close_to_torch(device, lambda a, b: (a @ b).tanh(), a, b)
        close_to_torch(device, lambda a, b: a.t() @ b.t(), a.t().contiguous(), b.t().contiguous())


@pytest.mark.slow
@pytest.mark.parametrize("item", tiles.DEPTHS)
def test_convolutions_by_tiles_of_every_size(
    device_id: str, item: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_interpreted(device_id):
        pytest.skip("the products cover its checks")
    use_tiles(monkeypatch, item)
    x, w, dy = normal(3, 4, 11, 12), normal(70, 4, 3, 3), normal(3, 70, 6, 6)

    def both(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, gradients = torch.func.vjp(lambda *z: functional.conv2d(*z, stride=2, padding=1), x, w)
        return y.relu(), *gradients(dy)

    close_to_torch(as_gpu(device_id), both, x, w, dy)


CONVOLUTIONS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((6, 4, 3, 2), {}),
    "one pixel": ((70, 4, 1, 1), {}),
    "strided": ((6, 4, 3, 3), {"stride": 2, "padding": 1}),
    "groups": ((6, 2, 3, 2), {"groups": 2, "padding": (1, 2)}),
    "depthwise": ((4, 1, 3, 3), {"groups": 4, "padding": 1}),
    "dilated": ((6, 4, 3, 2), {"dilation": 2, "stride": (1, 2), "padding": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_gradients(device_id: str, name: str) -> None:
    shape, how = CONVOLUTIONS[name]
    x, w, b = normal(2, 4, 11, 13), normal(*shape), normal(shape[0])
    dy = normal(*functional.conv2d(x, w, b, **how).shape)

    def both(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        y, gradients = torch.func.vjp(lambda *args: functional.conv2d(*args, **how), x, w, b)
        return y.relu(), *gradients(dy)

    close_to_torch(as_gpu(device_id), both, x, w, b, dy)


@pytest.mark.slow
def test_a_transposed_convolution(device_id: str) -> None:
    x, w, b = normal(2, 6, 5, 4), normal(6, 4, 3, 3), normal(4)
    how: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1}
    dy = normal(*functional.conv_transpose2d(x, w, b, **how).shape)

    def both(
        x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, dy: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        run = functional.conv_transpose2d
        y, gradients = torch.func.vjp(lambda *args: run(*args, **how), x, w, b)
        return y, *gradients(dy)

    close_to_torch(as_gpu(device_id), both, x, w, b, dy)


CHECKED = """
import torch
from dataclasses import replace
from as_gpu import AsGpu
from hetpipe.backends.opencl.gpu import tiles
from opencl_devices import close_to_torch
from torch.nn import functional
backend = AsGpu()
device = backend.open(next(info for info in backend.discover() if "oclgrind" in info.id))
def x(*shape): return torch.randn(shape, generator=torch.Generator().manual_seed(1))
def convolve(a, w, dy):
    y, gradients = torch.func.vjp(lambda a, w: functional.conv2d(a, w, stride=2, padding=1), a, w)
    return y, *gradients(dy)
for tiles.DEPTHS in [{item: depth} for item, depth in tiles.DEPTHS.items()]:
    close_to_torch(device, lambda a, b: (a @ b).tanh(), x(5, 19), x(19, 34))
close_to_torch(device, convolve, x(1, 2, 5, 4), x(3, 2, 3, 3), x(1, 3, 3, 2))
"""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_no_races_and_no_access_outside(device_id: str, tmp_path: Path) -> None:
    if device_id != IDS[0]:
        pytest.skip("Oclgrind is one device")
    assert log_of(CHECKED, tmp_path, "OCLGRIND_DATA_RACES") == ""
