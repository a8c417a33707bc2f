"""3x3 convolutions of stride 1 by minimal filtering: launches of `kernels/cpu/winograd.cl`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.product import Geometry
from ..lower.signature import Argument
from ._common import optional
from ._convolution import forward_axis, gradient_axes

FILES = ("cpu/common.cl", "cpu/unpacked.cl", "cpu/winograd.cl")
COLS, FEW = 32, 4
"""Output channels of a register tile, and least tiles of a product, as in the kernels."""
LANES = 16
SIDE = 4
"""Rows, and columns, of a tile's outputs."""
POINTS = (SIDE + 2) ** 2
LEAST_NBYTES, MOST_NBYTES = 6 << 20, 20 << 20
"""Bounds of memory for transformed inputs and products, which should stay in the last cache."""
MOST_FEW, CHUNK = 16, 32
"""Most tiles for which the products' kernel transforms weights itself, CHUNK channels at a time."""
KEPT_NBYTES = 10 << 20
"""Most bytes of transformed weights (four times the weights) that are kept between runs."""
PART_NBYTES = 5 << 18
"""Bytes of a part of the transformed weights; a core's cache holds a part. If one turn does all
tiles, each part is transformed and used before the next part."""
TILE_WORK, WEIGHT_WORK = 600, 540
"""Cost of transforming 16 channels of a tile, and 16 weights, in vector operations."""


def suits(g: Geometry, flipped: bool) -> bool:
    """Return whether minimal filtering suits the convolution, and is faster than the direct kernel.

    With `flipped`, judge the input gradient. Costs count multiply-adds of vectors. Per input
    channel, the direct kernel needs 9 for a pixel; minimal filtering needs 36 for a tile of 16
    pixels, and transforms. Minimal filtering loses if tiles are mostly border or channels are few.
    """
    lanes, depth = g.channels(flipped)
    if (g.groups, g.kernel, g.stride, g.dilation) != (1, (3, 3), (1, 1), (1, 1)) or depth < LANES:
        return False
    height, width = g.size if flipped else g.out_size
    tiles = g.images * math.ceil(height / SIDE) * math.ceil(width / SIDE)
    vectors = math.ceil(lanes / COLS) * COLS // LANES
    direct = 9 * g.images * height * width * depth * vectors
    products = POINTS * max(tiles, FEW) * depth * vectors
    transforms = TILE_WORK * tiles * math.ceil((depth + lanes) / LANES)
    return tiles >= FEW and products + transforms + WEIGHT_WORK * depth * vectors < direct


@dataclass(frozen=True)
class Sizes:
    """Sizes of one convolution, as in the kernels."""

    images: int
    lanes: int
    depth: int
    tile_rows: int
    """Tile rows of one image."""
    tile_cols: int

    @property
    def blocks(self) -> int:
        return math.ceil(self.lanes / COLS)

    # With power-of-two strides, a tile's rows would evict each other from the first-level cache.
    @property
    def depth_stride(self) -> int:
        return (math.ceil(self.depth / LANES) + 1) * LANES

    @property
    def lane_stride(self) -> int:
        return self.blocks * COLS + LANES

    @property
    def weights_nbytes(self) -> int:
        return 4 * POINTS * self.blocks * COLS * self.depth

    @property
    def all_rows(self) -> int:
        return self.images * self.tile_rows

    def part(self) -> int:
        """Return the number of blocks per part of the weights, see PART_NBYTES."""
        return min(self.blocks, max(1, PART_NBYTES * self.blocks // self.weights_nbytes))

    def turn(self) -> int:
        """Return the tile rows per turn with which intermediates fit a cache.

        Turns have equally many rows, so some overlap; as little as possible is computed twice. Each
        turn reads all weights, so turns are longer for more weights.
        """
        room = max(LEAST_NBYTES, min(self.weights_nbytes // 2, MOST_NBYTES))
        row = 4 * POINTS * (self.depth_stride + self.lane_stride) * self.tile_cols
        least = math.ceil(FEW / self.tile_cols)

        def repeated(turn: int) -> tuple[int, int]:
            turns = math.ceil(self.all_rows / turn)
            return turns * math.ceil(turn * self.tile_cols / FEW), turns

        return min(range(least, min(self.all_rows, max(least, room // row)) + 1), key=repeated)


def convolve(
    builder: Builder, g: Geometry, x: Value, weight: Value, bias: Value | None, flipped: bool
) -> Value:
    """Return y [N][lanes][height][width] for x [N][depth][.][.]."""
    (lanes, depth), (height, width) = g.channels(flipped), g.size if flipped else g.out_size
    sizes = Sizes(g.images, lanes, depth, math.ceil(height / SIDE), math.ceil(width / SIDE))
    y = builder.new((g.images, lanes, height, width), "float32")
    top, left = ((gradient_axes(g, i)[0] if flipped else forward_axis(g, i)).start for i in (0, 1))
    turn = sizes.turn()
    tiles = turn * sizes.tile_cols
    inputs = builder.new((POINTS, tiles, sizes.depth_stride), "float32")
    products = builder.new((tiles, POINTS, sizes.lane_stride), "float32")
    multiply = _Multiply(builder, weight, sizes, flipped, inputs, products)
    for first in range(0, sizes.all_rows, turn):
        place = {
            "first_row": min(first, sizes.all_rows - turn), "tile_rows": sizes.tile_rows,
            "tile_cols": sizes.tile_cols,
        }  # fmt: skip
        _launch(
            builder, "winograd_input", (turn, math.ceil(depth / LANES)),
            {
                "x": x, "inputs": inputs, "images": g.images, "depth": depth, "height": x.shape[2],
                "width": x.shape[3], "top": top, "left": left, **place,
                "depth_stride": sizes.depth_stride,
            },
        )  # fmt: skip
        multiply.turn()
        _launch(
            builder, "winograd_output", (turn, math.ceil(lanes / LANES)),
            {
                "products": products, **optional(builder, "bias", bias, products), "y": y, **place,
                "lanes": lanes, "lane_stride": sizes.lane_stride, "height": height, "width": width,
            },
        )  # fmt: skip
    return y


@dataclass(frozen=True)
class _Multiply:
    """Products of transformed inputs and weights, one turn after the other."""

    builder: Builder
    weight: Value
    sizes: Sizes
    flipped: bool
    inputs: Value
    products: Value
    _made: dict[int, Value] = field(default_factory=dict)
    """Transformed weights, by their first block."""

    def turn(self) -> None:
        tiles, blocks = self.inputs.shape[1], self.sizes.blocks
        is_only = tiles == self.sizes.all_rows * self.sizes.tile_cols
        if is_only and tiles % FEW == 0 and tiles <= MOST_FEW:
            self._few()
            return
        part = self.sizes.part() if is_only else blocks
        for first in range(0, blocks, part):
            count = min(part, blocks - first)
            if first not in self._made:
                self._made[first] = self._transformed(first, count)
            weights: dict[str, Argument] = {"weights": self._made[first], "first_block": first}
            self._launch("winograd_multiply", (count, POINTS), weights)

    def _few(self) -> None:
        items = min(self.builder.device.compute_units, self.sizes.blocks)
        room = self.builder.new((items, POINTS, CHUNK, COLS), "float32")
        self._launch("winograd_multiply_few", (items, 1), {"room": room, **self._weights("w_")})

    def _launch(self, name: str, size: tuple[int, int], weights: dict[str, Argument]) -> None:
        sizes = self.sizes
        sums: dict[str, Argument] = {
            "inputs": self.inputs, "products": self.products, "tiles": self.inputs.shape[1],
            "depth": sizes.depth, "depth_stride": sizes.depth_stride,
            "lane_stride": sizes.lane_stride,
        }  # fmt: skip
        _launch(self.builder, name, size, {**weights, **sums})

    def _transformed(self, first: int, blocks: int) -> Value:
        """Return the transformed weights of some blocks: [POINTS][blocks][depth][COLS]."""
        sizes = self.sizes
        out = self.builder.new((POINTS, blocks, sizes.depth, COLS), "float32")
        _launch(
            self.builder, "winograd_weights", (blocks, math.ceil(sizes.depth / LANES)),
            {"weights": out, "depth": sizes.depth, "first_block": first, **self._weights()},
            steady=self.builder.steady(self.weight) and sizes.weights_nbytes <= KEPT_NBYTES,
        )  # fmt: skip
        return out

    def _weights(self, prefix: str = "") -> dict[str, Argument]:
        lanes, depth = self.sizes.lanes, self.sizes.depth
        lane_stride, depth_stride = (9, lanes * 9) if self.flipped else (depth * 9, 9)
        return {
            "w": self.weight, "size": math.prod(self.weight.shape),
            f"{prefix}lane_stride": lane_stride, f"{prefix}depth_stride": depth_stride,
            "lanes": lanes, "flipped": int(self.flipped),
        }  # fmt: skip


def _launch(
    builder: Builder, name: str, size: tuple[int, int], args: dict[str, Argument],
    steady: bool = False,
) -> None:  # fmt: skip
    builder.launch(builder.device.kernel(name, FILES), (*size, 1), args, steady=steady)
