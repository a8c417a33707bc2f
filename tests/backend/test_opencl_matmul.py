"""OpenCL matrix products: every edge of the register tile, transposes, bias."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hetpipe.backends.opencl.lower.product import Operand, Product
from hetpipe.backends.opencl.ops.matmul import (
    COLS,
    ROWS,
    Parts,
    depth_blocks,
    parts_of,
    suits_in_place,
)
from hetpipe.backends.opencl.platform.tuning import by_rules, cache_nbytes
from opencl_products import INTERPRETERS, OPENCL, check_sums, on_device

aten = torch.ops.aten
DEPTH_BLOCK = by_rules(16, cache_nbytes(2)).depth_block
SHAPES = [
    (1, 1, 1), (12, 32, 16), (13, 33, 17), (64, 64, 64), (50, 70, DEPTH_BLOCK + 29), (24, 95, 31),
    (2, 100, 129), (100, 1, 37), (100, 2, 37), (3, 5, 7), (32, 10, 64), (40, 31, 1),
]  # fmt: skip


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_mm(device_id: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    check_sums(device_id, aten.mm.default, (random(m, k), random(k, n)), k)


@pytest.mark.wide
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_transposed_operands_are_read_in_place(device_id: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    check_sums(device_id, lambda a, b: aten.mm(a.t(), b.t()), (random(k, m), random(n, k)), k)
    check_sums(device_id, lambda a, b: aten.mm(a, b.t()), (random(m, k), random(n, k)), k)


@pytest.mark.parametrize("bias", [(33,), (1, 33), (13, 1), (13, 33)], ids=str)
@pytest.mark.parametrize("depth", [5, 2 * DEPTH_BLOCK + 1])
@pytest.mark.parametrize("device_id", OPENCL)
def test_addmm_scales_and_broadcasts(device_id: str, depth: int, bias: tuple[int, ...]) -> None:
    inputs = (random(*bias), random(13, depth), random(depth, 33))
    check_sums(device_id, lambda c, a, b: aten.addmm(c, a, b, beta=0.5, alpha=2.0), inputs, depth)


@pytest.mark.parametrize("shape", [(100, 2), (1, 40), (4, 4)], ids=str)
@pytest.mark.parametrize("device_id", OPENCL)
def test_small_products_with_bias(device_id: str, shape: tuple[int, int]) -> None:
    m, n = shape
    for bias in ((n,), (m, 1), (m, n)):
        inputs = (random(*bias), random(m, 19), random(19, n))
        check_sums(device_id, aten.addmm.default, inputs, 19)


@pytest.mark.parametrize("device_id", OPENCL)
def test_beta_of_zero_ignores_the_bias(device_id: str) -> None:
    a, b, nothing = random(13, 40), random(40, 33), torch.full((33,), float("nan"))
    (found,) = on_device(device_id, lambda c, a, b: aten.addmm(c, a, b, beta=0), (nothing, a, b))
    torch.testing.assert_close(found, a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device_id", OPENCL)
def test_bmm(device_id: str) -> None:
    check_sums(device_id, aten.bmm.default, (random(3, 25, 40), random(3, 40, 50)), 40)
    inputs = random(4, 9, 20), random(4, 33, 20)
    check_sums(device_id, lambda a, b: aten.bmm(a, b.transpose(1, 2)), inputs, 20)


def test_blocks_of_depth_cover_it_evenly() -> None:
    for depth in (1, DEPTH_BLOCK, DEPTH_BLOCK + 1, 5 * DEPTH_BLOCK - 3):
        blocks = depth_blocks(depth, DEPTH_BLOCK)
        assert [k0 for k0, _ in blocks[1:]] == [k1 for _, k1 in blocks[:-1]]
        assert (blocks[0][0], blocks[-1][1]) == (0, depth)
        sizes = [k1 - k0 for k0, k1 in blocks]
        assert max(sizes) <= DEPTH_BLOCK
        assert max(sizes) - min(sizes) <= 1


def target(units: int, chunks: bool = False) -> Any:
    abilities = SimpleNamespace(chunks=chunks)
    return SimpleNamespace(compute_units=units, info=SimpleNamespace(capabilities=abilities))


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("units", [1, 2, 3, 64])
@pytest.mark.parametrize("shape", [*SHAPES, (512, 512, 512), (4096, 256, 512)], ids=str)
def test_parts_cover_a_product_once(shape: tuple[int, int, int], units: int, chunks: bool) -> None:
    m, n, k = shape
    nothing: Any = None
    parts = parts_of(target(units, chunks), Product(1, m, n, k, nothing, nothing))
    assert (parts.rows % ROWS, parts.cols % COLS) == (0, 0)
    for size, part, count in zip((m, n), (parts.rows, parts.cols), parts.counts, strict=True):
        assert (count - 1) * part < size <= count * part
    if units == 1 and not chunks:
        assert parts.counts == (1, 1)


def test_nearly_every_unit_gets_a_part_of_a_large_product() -> None:
    """Parts consist of whole panels, so there may be a few fewer parts than units."""
    nothing: Any = None
    for units in (2, 3, 16, 64):
        for m, n in ((512, 512), (4096, 64), (64, 4096)):
            parts = parts_of(target(units), Product(1, m, n, 100, nothing, nothing))
            assert parts.counts[0] * parts.counts[1] >= 0.85 * units
    streamed = parts_of(target(2, chunks=True), Product(1, 512, 64, 100, nothing, nothing))
    assert streamed.counts[0] >= 16


@pytest.mark.parametrize("m", [41, 44])
@pytest.mark.parametrize("device_id", OPENCL)
def test_parts_of_a_product_are_right(
    device_id: str, m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts of rows by three of columns, the last of each incomplete; operands in each form."""
    parts = Parts(24, 64, (2, 3))
    monkeypatch.setattr("hetpipe.backends.opencl.ops.matmul.parts_of", lambda *_: parts)
    n, k = 150, 2 * DEPTH_BLOCK + 3
    a, b = random(2, m, k), random(2, k, n)
    check_sums(device_id, aten.bmm.default, (a, b), k)
    turned = a.transpose(1, 2).contiguous(), b.transpose(1, 2).contiguous()
    check_sums(device_id, lambda a, b: aten.bmm(a.mT, b.mT), turned, k)
    wide = random(2, m, 2 * k), random(2, k, 2 * n)
    check_sums(device_id, lambda a, b: aten.bmm(a[..., ::2], b[..., ::2]), wide, k)


def test_rows_are_read_in_place_if_packing_costs_more() -> None:
    def suits(rows: int, cols: int, depth: int, row: int, col: int = 1) -> bool:
        nothing: Any = None
        a = Operand(nothing, 0, 0, row, col)
        product = Product(1, rows, cols, depth, a, nothing)
        return suits_in_place(product, parts_of(target(1), product))

    assert suits(512, 512, 512, row=512)
    assert suits(2048, 384, 1536, row=1536)
    assert not suits(510, 512, 512, row=512)  # a tile would read beyond the last row
    assert not suits(512, 1024, 512, row=512)  # many panels of columns
    assert not suits(512, 512, 512, row=1, col=512)  # rows are not contiguous
    assert not suits(512, 512, 1024, row=1024)  # all rows' lines are in the same set of the cache
    assert suits(512, 512, 1024, row=1040)


@pytest.mark.parametrize("device_id", INTERPRETERS)
def test_interpreted(device_id: str) -> None:
    check_sums(device_id, aten.mm.default, (random(16, 40), random(40, 33)), 40)
    check_sums(device_id, aten.mm.default, (random(13, 40), random(40, 33)), 40)
    check_sums(device_id, aten.mm.default, (random(3, 5), random(5, 4)), 5)
    turned = random(40, 13), random(33, 40)
    check_sums(device_id, lambda a, b: aten.mm(a.t(), b.t()), turned, 40)
