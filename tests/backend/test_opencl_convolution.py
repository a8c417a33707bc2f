"""OpenCL convolutions: sizes that no tile fits, strides, dilation, groups, transposes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from found_devices import trace
from hetpipe.backends.opencl.lower.lowering import lower
from hetpipe.backends.opencl.ops._convolution import MOST_PIXELS, choose_tile
from hetpipe.backends.opencl.ops._weight_gradient import MOST_SUMS, choose_tiling
from opencl_devices import opencl_device
from opencl_products import INTERPRETERS, OPENCL, check_sums

aten = torch.ops.aten


@dataclass(frozen=True)
class Shape:
    x: tuple[int, ...]
    channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = (0, 0)

    @property
    def rest(self) -> tuple[Any, ...]:
        return (list(self.stride), list(self.padding), list(self.dilation), self.transposed,
                list(self.output_padding), self.groups)  # fmt: skip

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide, narrow = self.x[1], self.channels
        if self.transposed:
            wide, narrow = narrow, wide
        g = torch.Generator().manual_seed(sum(self.x))
        weight = torch.randn(narrow, wide // self.groups, *self.kernel, generator=g)
        return torch.randn(self.x, generator=g), weight, torch.randn(self.channels, generator=g)


SHAPES = {
    "3x3": Shape((2, 64, 8, 8), 64, (3, 3), padding=(1, 1)),
    "4x4 images": Shape((3, 20, 4, 4), 40, (3, 3), padding=(1, 1)),
    "stride 2": Shape((2, 16, 8, 8), 33, (3, 3), (2, 2), (1, 1)),
    "1x1 stride 2": Shape((2, 8, 8, 8), 16, (1, 1), (2, 2)),
    "1x1 images": Shape((9, 17, 1, 1), 19, (1, 1)),
    "one channel": Shape((2, 1, 7, 9), 5, (3, 3), padding=(1, 1)),
    "wide row": Shape((1, 3, 5, 37), 6, (3, 3), padding=(1, 1)),
    "7x7 stride 2": Shape((1, 3, 23, 23), 8, (7, 7), (2, 2), (3, 3)),
    "dilated, strided": Shape((2, 6, 9, 11), 4, (3, 3), (2, 2), (0, 0), (2, 2), 2),
    "depthwise": Shape((1, 4, 13, 17), 4, (5, 5), (3, 3), (4, 4), groups=4),
    "uneven": Shape((2, 6, 10, 7), 9, (3, 2), (2, 3), (2, 1), (2, 1), 3),
    "padding beyond the kernel": Shape((1, 2, 5, 5), 3, (2, 2), (2, 2), (3, 3)),
    "1x1 images across blocks": Shape((5, 40, 7, 7), 50, (1, 1)),
    "1x1 in many blocks": Shape((3, 24, 41, 43), 30, (1, 1)),
    "1x1 in groups, uneven strides": Shape((3, 12, 8, 9), 20, (1, 1), (3, 2), groups=2),
    "1x1 transposed": Shape((2, 7, 5, 6), 8, (1, 1), (2, 3), (0, 0), (1, 1), 1, True, (1, 2)),
    "1x1 with a border": Shape((2, 7, 5, 6), 8, (1, 1), (2, 1), (1, 2)),
    "folded": Shape((2, 3, 23, 18), 30, (5, 4), (2, 1), (2, 3), (1, 2)),
    "folded in groups": Shape((2, 4, 19, 20), 40, (3, 3), (1, 1), (1, 1), groups=2),
    "many rows": Shape((2, 20, 37, 29), 70, (3, 3), padding=(1, 1)),
    "many weights": Shape((1, 300, 6, 6), 290, (1, 3), padding=(0, 1)),
    "small images": Shape((2, 8, 3, 3), 41, (3, 3), padding=(1, 1)),
    "small images, uneven": Shape((3, 7, 5, 4), 70, (3, 2), (2, 3), (1, 2), (2, 1)),
    "small images, many pixels": Shape((5, 5, 4, 3), 120, (3, 3), padding=(1, 1)),
    "small images, transposed": Shape((2, 90, 3, 3), 12, (3, 3), (2, 2), (1, 1), transposed=True),
    "one-dimensional": Shape((2, 5, 19), 7, (3,), (2,), (1,), (1,), 1, False, (0,)),
    "transposed": Shape((2, 6, 5, 7), 8, (3, 3), (2, 2), (1, 1), (1, 1), 2, True, (1, 1)),
}


def forward(shape: Shape) -> Any:
    return lambda x, w, b: aten.convolution(x, w, b, *shape.rest)


def backward(shape: Shape, mask: list[bool]) -> Any:
    def fn(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = aten.convolution_backward(dy, x, w, [shape.channels], *shape.rest, mask)
        return tuple(each for each, want in zip(found, mask, strict=True) if want)

    return fn


@pytest.mark.wide
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("device_id", OPENCL)
def test_forward(device_id: str, name: str) -> None:
    x, weight, bias = SHAPES[name].tensors()
    check_sums(device_id, forward(SHAPES[name]), (x, weight, bias), weight[0].numel() + 1)


@pytest.mark.wide
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("device_id", OPENCL)
def test_gradients(device_id: str, name: str) -> None:
    shape = SHAPES[name]
    x, weight, bias = shape.tensors()
    dy = torch.randn_like(forward(shape)(x, weight, bias))
    terms = max(dy[:, 0].numel(), weight[:, 0].numel())
    check_sums(device_id, backward(shape, [True, True, True]), (dy, x, weight), terms)


@pytest.mark.slow
@pytest.mark.parametrize("only", range(3))
@pytest.mark.parametrize("name", ["stride 2", "transposed"])
@pytest.mark.parametrize("device_id", OPENCL)
def test_output_mask(device_id: str, name: str, only: int) -> None:
    shape = SHAPES[name]
    x, weight, bias = shape.tensors()
    dy = torch.randn_like(forward(shape)(x, weight, bias))
    mask = [i == only for i in range(3)]
    check_sums(device_id, backward(shape, mask), (dy, x, weight), 1000)


@pytest.mark.parametrize("device_id", INTERPRETERS)
def test_interpreted(device_id: str) -> None:
    shape = Shape((2, 3, 5, 4), 5, (3, 3), (2, 2), (1, 1))
    x, weight, bias = shape.tensors()
    check_sums(device_id, forward(shape), (x, weight, bias), 28)
    dy = torch.randn_like(forward(shape)(x, weight, bias))
    check_sums(device_id, backward(shape, [True, True, True]), (dy, x, weight), 45)


@pytest.mark.parametrize("device_id", OPENCL)
def test_images_in_turns(device_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn computes two of six images, since the images are larger than the weights."""
    monkeypatch.setattr("hetpipe.backends.opencl.ops.convolution.TURN_NBYTES", 1 << 14)
    shape = Shape((6, 16, 9, 9), 40, (3, 3), (2, 2), (1, 1))
    x, weight, bias = shape.tensors()
    launches = lower(
        trace(forward(shape), (x, weight, bias), {}), opencl_device(device_id).target
    ).launches
    assert [launch.kernel.name for launch in launches].count("convolve") == 3
    check_sums(device_id, forward(shape), (x, weight, bias), weight[0].numel() + 1)


@pytest.mark.parametrize("device_id", OPENCL)
def test_small_images_copy_patches(device_id: str) -> None:
    for name in (name for name in SHAPES if name.startswith("small images")):
        x, weight, bias = SHAPES[name].tensors()
        graph = trace(forward(SHAPES[name]), (x, weight, bias), {})
        launches = lower(graph, opencl_device(device_id).target).launches
        assert "multiply" in {launch.kernel.name for launch in launches}, name


@pytest.mark.parametrize("name", ["1x1 images", "1x1 transposed", "folded in groups"])
@pytest.mark.parametrize("device_id", INTERPRETERS)
def test_products_interpreted(device_id: str, name: str) -> None:
    shape = replace(SHAPES[name], x=(2, *SHAPES[name].x[1:2], 3, 4), channels=26)
    x, weight, bias = shape.tensors()
    check_sums(device_id, forward(shape), (x, weight, bias), 20)
    dy = torch.randn_like(forward(shape)(x, weight, bias))
    check_sums(device_id, backward(shape, [True, True, True]), (dy, x, weight), 300)


def test_weight_tiles_fit_registers_and_waste_little_on_common_sizes() -> None:
    for depth, kernel_w in ((3, 7), (3, 3), (64, 1), (64, 3), (512, 1), (512, 3), (48, 5)):
        tiling = choose_tiling(depth, kernel_w, 1)
        tiles = math.ceil(depth / tiling.depth) * math.ceil(tiling.depth * kernel_w / tiling.sums)
        assert tiling.sums <= MOST_SUMS
        assert tiles * tiling.sums <= 1.05 * depth * kernel_w


def test_weight_tiles_hold_whole_taps_if_taps_are_apart() -> None:
    for depth, kernel_w in ((3, 7), (5, 3), (64, 3), (7, 2)):
        tiling = choose_tiling(depth, kernel_w, 2)
        assert tiling.sums % tiling.depth == 0
        assert tiling.depth * kernel_w % tiling.sums == 0


def test_tiles_fit_registers_and_waste_nothing_on_common_sizes() -> None:
    for images, rows, cols in ((32, 8, 8), (32, 4, 4), (16, 2, 2), (8, 14, 14), (8, 56, 56)):
        tile = choose_tile(images, rows, cols)
        assert 8 <= tile[0] * tile[1] * tile[2] <= MOST_PIXELS
        assert (images % tile[0], rows % tile[1], cols % tile[2]) == (0, 0, 0)
