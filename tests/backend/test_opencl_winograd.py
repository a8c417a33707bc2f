"""3x3 convolutions by minimal filtering: right at every border, accurate, and used if suitable."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from found_devices import trace
from hetpipe.backends.opencl.lower.lowering import lower
from hetpipe.backends.opencl.lower.product import Geometry
from hetpipe.backends.opencl.ops import _winograd
from hetpipe.backends.opencl.ops._winograd import FEW, Sizes, suits
from oclgrind import ORACLE, log_of
from opencl_devices import opencl_device
from opencl_products import EPS, OPENCL, on_device, outputs, wide
from plans import unpriced
from reference import train
from torch import nn
from torch.nn import functional

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Member

aten = torch.ops.aten
Function = Callable[..., Any]
on_every_device = pytest.mark.parametrize("device_id", OPENCL)


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def convolution(padding: tuple[int, int], stride: int = 1, groups: int = 1) -> Function:
    rest = ([stride] * 2, list(padding), [1, 1], False, [0, 0], groups)
    return lambda x, w, b: aten.convolution(x, w, b, *rest)


def transposed(padding: tuple[int, int]) -> Function:
    rest = ([1, 1], list(padding), [1, 1], True, [0, 0], 1)
    return lambda x, w, b: aten.convolution(x, w, b, *rest)


def gradients(padding: tuple[int, int], mask: list[bool]) -> Function:
    rest = ([1, 1], list(padding), [1, 1], False, [0, 0], 1, mask)

    def fn(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        found = aten.convolution_backward(dy, x, w, [w.shape[0]], *rest)
        return [each for each, want in zip(found, mask, strict=True) if want]

    return fn


def filters(device_id: str, fn: Function, *inputs: torch.Tensor) -> int:
    """Return the number of launches of `fn` that multiply by minimal filtering."""
    launches = lower(trace(fn, inputs, {}), opencl_device(device_id).target).launches
    return sum(launch.kernel.name.startswith("winograd_multiply") for launch in launches)


def check(device_id: str, fn: Function, inputs: list[torch.Tensor], terms: int) -> None:
    """Check that errors stay under 4 sqrt(terms) eps of the largest fn(|inputs|).

    A tile shares its errors, so each element has the bound of the largest.
    """
    magnitudes = outputs(fn, [each.abs() for each in wide(inputs)])
    expected, found = outputs(fn, wide(inputs)), on_device(device_id, fn, inputs)
    for got, want, magnitude in zip(found, expected, magnitudes, strict=True):
        bound = 4 * math.sqrt(terms) * EPS * float(magnitude.max())
        torch.testing.assert_close(got.double(), want, rtol=0, atol=bound)


SHAPES: dict[str, tuple[tuple[int, ...], int, tuple[int, int]]] = {
    "whole tiles": ((2, 64, 8, 8), 64, (1, 1)),
    "odd": ((3, 48, 13, 9), 40, (1, 1)),
    "odd channels": ((2, 35, 11, 11), 45, (1, 1)),
    "one image, no padding": ((1, 64, 15, 14), 33, (0, 0)),
    "padding 2": ((2, 32, 11, 10), 64, (2, 2)),
    "padding beyond the kernel": ((2, 32, 12, 12), 32, (5, 4)),
    "unlike paddings": ((2, 32, 13, 12), 32, (0, 2)),
    "several strips in a row": ((1, 32, 9, 71), 32, (1, 1)),
    "few lanes": ((2, 64, 24, 24), 9, (1, 1)),
    "one tile": ((16, 64, 4, 4), 64, (1, 1)),
}
"""Shape of x, output channels, padding."""


@pytest.mark.wide
@pytest.mark.parametrize("name", SHAPES)
@on_every_device
def test_forward(device_id: str, name: str) -> None:
    shape, lanes, padding = SHAPES[name]
    inputs = tensors(shape, (lanes, shape[1], 3, 3), (lanes,))
    assert filters(device_id, convolution(padding), *inputs) > 0
    check(device_id, convolution(padding), inputs, 9 * shape[1] + 1)


@pytest.mark.wide
@pytest.mark.parametrize("name", [name for name in SHAPES if max(SHAPES[name][2]) <= 2])
@on_every_device
def test_input_gradient(device_id: str, name: str) -> None:
    """The gradient is itself a convolution of the given shape: dy is smaller or larger than x."""
    dy_shape, lanes, padding = SHAPES[name]
    forward = [2 - each for each in padding]
    sizes = [n + 2 * p - 2 for n, p in zip(dy_shape[2:], padding, strict=True)]
    x_shape = (dy_shape[0], lanes, *sizes)
    inputs = tensors(dy_shape, x_shape, (dy_shape[1], lanes, 3, 3))
    fn = gradients((forward[0], forward[1]), [True, False, False])
    assert filters(device_id, fn, *inputs) > 0
    check(device_id, fn, inputs, 9 * dy_shape[1])


@on_every_device
def test_all_gradients_and_transposes(device_id: str) -> None:
    inputs = tensors((2, 48, 12, 12), (2, 32, 12, 12), (48, 32, 3, 3))
    assert filters(device_id, gradients((1, 1), [True] * 3), *inputs) > 0
    check(device_id, gradients((1, 1), [True] * 3), inputs, 2 * 144)
    across = tensors((2, 48, 12, 12), (48, 32, 3, 3), (32,))
    assert filters(device_id, transposed((1, 0)), *across) > 0
    check(device_id, transposed((1, 0)), across, 9 * 48 + 1)


@on_every_device
def test_overlapping_turns(device_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory, the last turn repeats a part of the previous one."""
    monkeypatch.setattr(_winograd, "LEAST_NBYTES", 4 * 36 * 96 * 3 * 4)
    inputs = tensors((2, 32, 27, 9), (32, 32, 3, 3), (32,))
    assert filters(device_id, convolution((1, 1)), *inputs) == 4  # 14 rows of 3 tiles, 4 at a time
    check(device_id, convolution((1, 1)), inputs, 9 * 32 + 1)


@pytest.mark.parametrize("tiles", [4, 5, 6, 7, 9, 11, 13])
@on_every_device
def test_few_tiles(device_id: str, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few tiles for a register tile, or not a multiple, the last tiles overlap others."""
    monkeypatch.setattr(_winograd, "WEIGHT_WORK", 0)
    inputs = tensors((1, 64, 4, 4 * tiles - 1), (48, 64, 3, 3), (48,))
    assert filters(device_id, convolution((1, 1)), *inputs) == 1
    check(device_id, convolution((1, 1)), inputs, 9 * 64 + 1)


def test_turns_cover_all_rows_and_fit() -> None:
    for images, tile_rows, tile_cols in ((8, 56, 56), (8, 2, 2), (1, 4, 1), (1, 7, 7), (3, 1, 2)):
        for channels in (16, 64, 512):
            sizes = Sizes(images, channels, channels, tile_rows, tile_cols)
            turn = sizes.turn()
            assert turn * tile_cols >= FEW
            assert turn <= images * tile_rows
            row_nbytes = 4 * 36 * tile_cols * (sizes.depth_stride + sizes.lane_stride)
            assert turn * row_nbytes <= _winograd.MOST_NBYTES


@pytest.mark.parametrize("kind", ["normal", "offset", "spread"])
@on_every_device
def test_error_of_ill_scaled_inputs(device_id: str, kind: str) -> None:
    """The error is a quarter of the bound for sums, 16 sqrt(terms) eps of the largest."""
    x, w, b = tensors((2, 128, 14, 14), (64, 128, 3, 3), (64,))
    if kind == "offset":
        x += 1000
    if kind == "spread":
        x *= 10 ** torch.empty_like(x).uniform_(-3, 3, generator=torch.Generator().manual_seed(1))
        w *= 10 ** torch.empty_like(w).uniform_(-3, 3, generator=torch.Generator().manual_seed(2))
    fn = convolution((1, 1))
    assert filters(device_id, fn, x, w, b) > 0
    want = fn(x.double(), w.double(), b.double())
    (found,) = on_device(device_id, fn, [x, w, b])
    bound = 16 * math.sqrt(9 * 128) * EPS * float(want.abs().max())
    assert float((found.double() - want).abs().max()) < bound / 4


@on_every_device
def test_the_same_bits_every_run(device_id: str) -> None:
    inputs = tensors((2, 64, 14, 14), (64, 64, 3, 3), (64,))
    first, *others = (on_device(device_id, convolution((1, 1)), inputs)[0] for _ in range(3))
    assert all(torch.equal(first, other) for other in others)


@on_every_device
def test_other_convolutions_are_not_filtered(device_id: str) -> None:
    x, w, b = tensors((2, 64, 16, 16), (64, 64, 3, 3), (64,))
    assert filters(device_id, convolution((1, 1)), x, w, b) > 0
    assert filters(device_id, convolution((1, 1), stride=2), x, w, b) == 0
    assert filters(device_id, convolution((1, 1), groups=2), x, w[:, :32], b) == 0
    assert filters(device_id, convolution((0, 0)), x, w[:, :, :1, :1], b) == 0
    assert filters(device_id, convolution((1, 1)), x[:, :3], w[:, :3], b) == 0


def geometry(images: int, channels: int, side: int) -> Geometry:
    return Geometry(images, 1, channels, channels, (side, side), (side, side), (3, 3), (1, 1),
                    (1, 1), (1, 1))  # fmt: skip


def test_suitable_sizes() -> None:
    """Minimal filtering suits all layers of VGG-16 and ResNet-50.

    It does not suit images of 2x2 pixels, nor one small image with many channels, whose weights
    would take longer to transform than to use.
    """
    for channels, side in ((64, 224), (128, 112), (64, 56), (256, 56), (512, 28), (512, 14)):
        assert suits(geometry(8, channels, side), flipped=False)
        assert suits(geometry(1, channels, side), flipped=True)
    assert suits(geometry(8, 512, 7), flipped=False)
    assert not suits(geometry(1, 512, 7), flipped=False)
    assert not suits(geometry(64, 512, 2), flipped=False)
    assert not suits(geometry(1, 64, 6), flipped=False)


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(48, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


@pytest.mark.slow
@on_every_device
def test_training_equals_torch(device_id: str) -> None:
    x, y = tensors((8, 3, 14, 14))[0], torch.arange(8)
    torch.manual_seed(0)
    module = small_cnn()
    batches = [(x, y)] * 4
    expected = train(
        module, functional.cross_entropy, batches, 2, lambda p: torch.optim.SGD(p, 0.05, 0.9)
    ).losses
    captured = Captured(module, functional.cross_entropy, (x, y))
    cluster = hp.Cluster((Member(device_id, device_id),), transport="local")
    plan, costs = unpriced(captured, cluster.ids, "1f1b", 8, 2)
    with hp.Pipeline(
        module, functional.cross_entropy, (x, y), cluster=cluster, captured=captured, plan=plan,
        optimizer=hp.optim.sgd(lr=0.05, momentum=0.9), costs=costs,
    ) as pipe:  # fmt: skip
        found = [pipe.step(x, y) for _ in range(4)]
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 0.01


GRAPHS = """
import torch
from oclgrind import poison
from hetpipe.backends.opencl.ops import _winograd
from test_opencl_winograd import convolution, filters, gradients, tensors
from opencl_devices import close_to_torch, opencl_device
_winograd.WEIGHT_WORK = 0  # tiny shapes
_winograd.LEAST_NBYTES = 1 << 16
device = opencl_device(ORACLE)
poison(device)
inputs = tensors((1, 17, 9, 11), (5, 17, 3, 3), (5,))
assert filters(ORACLE, convolution((1, 1)), *inputs) > 1
close_to_torch(device, convolution((1, 1)), *inputs)
inputs = tensors((1, 17, 9, 13), (1, 9, 11, 11), (17, 9, 3, 3))
assert filters(ORACLE, gradients((0, 2), [True, False, False]), *inputs) > 1
close_to_torch(device, gradients((0, 2), [True, False, False]), *inputs)
_winograd.LEAST_NBYTES = 1 << 20
inputs = tensors((1, 35, 8, 7), (5, 35, 3, 3), (5,))
assert filters(ORACLE, convolution((1, 1)), *inputs) == 1
close_to_torch(device, convolution((1, 1)), *inputs)
"""


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_kernels_are_clean(tmp_path: Path) -> None:
    """No kernel accesses memory outside a tensor, races, or uses unwritten values.

    Oclgrind's own check for unwritten values reports other results for these kernels.
    """
    assert log_of(GRAPHS, tmp_path, "OCLGRIND_DATA_RACES") == ""
