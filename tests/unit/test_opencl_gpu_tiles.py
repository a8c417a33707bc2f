"""The choice of tiles for graphics cards, for a card with 132 compute units."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hetpipe.backends.opencl.gpu.tiles import loads_of, tiles_of
from hetpipe.backends.opencl.lower.expr import Value
from hetpipe.backends.opencl.lower.product import Operand
from hetpipe.backends.opencl.lower.target import Target

from hetpipe.sdk.info import DeviceInfo

INFO = DeviceInfo("opencl:x:0", "opencl", "gpu", "a card", "", "", 1 << 34, "card", ("float32",))
CARD = Target(INFO, 1024, 132, 48 << 10, 128, family="gpu")


@pytest.mark.parametrize(
    ("size", "batches", "item", "parts"),
    [
        ((8192, 3072, 768), 1, 8, 1),  # many tiles
        ((512, 512, 64), 1, 2, 1),  # few tiles, and sums too short for parts
        ((64, 64, 64), 96, 4, 1),  # a batch
        ((768, 3072, 8192), 1, 8, 3),  # few tiles, but long sums
        ((1, 1, 5), 1, 2, 1),
    ],
)
def test_tiles_are_large_if_they_fill_the_card(
    size: tuple[int, int, int], batches: int, item: int, parts: int
) -> None:
    tiles = tiles_of(CARD, size, batches)
    assert (tiles.item, tiles.parts) == (item, parts)
    assert tiles.parts * tiles.each >= size[2] > (tiles.parts - 1) * tiles.each
    assert tiles.parts == 1 or tiles.each % tiles.step == 0


def test_tiles_fit_the_local_memory_and_the_work_groups() -> None:
    small = replace(CARD, local_memory_nbytes=6 << 10, max_work_group_size=128)
    tiles = tiles_of(small, (8192, 3072, 768), 1)
    assert tiles.group == 8
    assert tiles.local_nbytes <= small.local_memory_nbytes
    assert "DOUBLE" not in tiles.macros(small)
    assert "DOUBLE" in tiles.macros(CARD)


@pytest.mark.parametrize(
    ("strides", "offset", "sizes", "expected"),
    [
        ((64, 1), 0, (10, 64), ("X_ALONG=K", "X_WIDTH=4")),
        ((64, 1), 2, (10, 64), ("X_ALONG=K", "X_WIDTH=1")),
        ((62, 1), 0, (10, 62), ("X_ALONG=K", "X_WIDTH=1")),
        ((1, 64), 0, (64, 10), ("X_ALONG=LINES", "X_WIDTH=4")),
        ((1, 66), 0, (64, 10), ("X_ALONG=LINES", "X_WIDTH=1")),
        ((1, 64), 0, (62, 10), ("X_ALONG=LINES", "X_WIDTH=1")),
        ((128, 2), 0, (10, 64), ("X_ALONG=K", "X_WIDTH=1")),
    ],
)
def test_vectors_need_neighbours_and_aligned_addresses(
    strides: tuple[int, int], offset: int, sizes: tuple[int, int], expected: tuple[str, str]
) -> None:
    operand = Operand(Value(1, (64, 64), "float32"), offset, 0, *strides)
    assert loads_of("X", operand, *sizes) == expected
