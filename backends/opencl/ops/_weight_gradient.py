"""Gradients of weights on CPUs: register tiles of sums over blocks of pixels in a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.product import Geometry
from ._convolution import filled

FILES = ("cpu/common.cl", "cpu/weight_gradient.cl")
COLS, LANES = 32, 16
"""Output channels of a register tile, and floats of a vector, as in the kernels."""
MOST_SUMS, MOST_NARROW = 14, 6
"""Most sums per lane in a register tile. Each takes 2 of 32 registers, or 2 of 16 if narrow."""
PIXELS = 256
"""Approximate number of output pixels in a block."""


@dataclass(frozen=True)
class Tiling:
    """A register tile: `sums` pairs of a channel (of `depth`) and a tap (of a kernel's row)."""

    depth: int
    sums: int


@cache
def choose_tiling(depth: int, kernel_w: int, dilation_w: int, most: int = MOST_SUMS) -> Tiling:
    """Return the tile of up to `most` sums with the least waste.

    Waste is work on channels that do not exist, sums computed twice, and loads of dy per sum.
    """
    best, best_score = Tiling(1, 1), 0.0
    for channels in range(1, min(depth, most) + 1):
        row = channels * kernel_w
        for sums in range(1, min(row, most) + 1):
            if dilation_w > 1 and kernel_w > 1 and (sums % channels or row % sums):
                continue  # the next tap is no neighbour in memory
            useful = filled(depth, channels) * filled(row, sums)
            score = useful * sums / (sums + 2)
            score *= 1.0 if channels in (1, 2, 4, 8) else 0.98  # quick to pack
            if score > best_score:
                best, best_score = Tiling(channels, sums), score
    return best


@dataclass(frozen=True)
class _Blocks:
    """Division of the work; panels have the same sizes as in the kernel."""

    images: int
    rows: int
    lane_blocks: int
    depth_tiles: int
    parts: int
    items: int
    room: int


def weight_gradient(builder: Builder, geometry: Geometry, x: Value, dy: Value) -> Value:
    """Return dw [Co][Ci / groups][kh][kw] for x [N][Ci][H][W] and dy [N][Co][OH][OW]."""
    g = _flat(geometry)
    lanes, depth = g.channels()
    most_sums = MOST_NARROW if builder.device.tuning.narrow else MOST_SUMS
    tiling = choose_tiling(depth, g.kernel[1], g.dilation[1], most_sums)
    macros = (f"DEPTH_TILE={tiling.depth}", f"SUMS={tiling.sums}")
    # Each operand gets as many floats as two panels of a matrix product.
    most = 2 * COLS * builder.device.tuning.depth_block
    b = _blocks(g, tiling, builder.device.compute_units, most)
    tiles = math.ceil(depth / tiling.depth)
    tiles_w = math.ceil(g.kernel[1] * tiling.depth / tiling.sums)
    all_blocks = g.groups * math.ceil(lanes / COLS)
    sums = builder.new(
        (b.parts, all_blocks, g.kernel[0], tiles, tiles_w, tiling.sums, COLS), "float32"
    )
    dw = builder.new((g.out_channels, depth, *g.kernel), "float32")
    sizes = {
        "groups": g.groups, "lanes": lanes, "depth": depth, **g.pairs("kernel"), "parts": b.parts,
    }  # fmt: skip
    builder.launch(
        builder.device.kernel("weight_sums", FILES, *macros), (b.items,),
        {
            "x": x, "dy": dy, "sums": sums, "room": builder.new((b.items, b.room), "float32"),
            "room_size": b.room, "images": g.images, "rows": g.out_size[0], "cols": g.out_size[1],
            "height": g.size[0], "width": g.size[1], **g.pairs("stride", "dilation"),
            "top": g.padding[0], "left": g.padding[1], "image_block": b.images,
            "row_block": b.rows, "block_chunk": b.lane_blocks, "tile_chunk": b.depth_tiles,
            **sizes,
        },
    )  # fmt: skip
    weights = depth * math.prod(g.kernel)
    builder.launch(
        builder.device.kernel("weight_result", FILES, *macros),
        (math.ceil(weights / LANES), math.ceil(lanes / LANES), g.groups),
        {"sums": sums, "dw": dw, **sizes},
    )  # fmt: skip
    return dw


def _flat(g: Geometry) -> Geometry:
    """Return `g`, with rows of up to PIXELS pixels if it is 1x1 with stride 1 and no padding."""
    if (g.kernel, g.stride, g.padding) != ((1, 1), (1, 1), (0, 0)):
        return g
    pixels = math.prod(g.size)
    cols = max(n for n in range(1, PIXELS + 1) if pixels % n == 0)
    if cols < min(LANES, g.size[1]):
        return g
    size = (pixels // cols, cols)
    return replace(g, size=size, out_size=size)


def _blocks(g: Geometry, tiling: Tiling, units: int, most: int) -> _Blocks:
    """Divide the work among `units` compute units; an operand's panels take up to `most` floats."""
    rows, cols = g.out_size
    row_block = min(rows, max(1, round(PIXELS / cols)))
    image_block = _chunk(g.images, PIXELS // (rows * cols)) if row_block == rows else 1
    x_rows, x_cols = g.extent(row_block, cols)
    dy_panel = image_block * row_block * cols * COLS + LANES * COLS
    x_panel = image_block * x_rows * x_cols * tiling.depth + LANES * LANES
    lanes, depth = g.channels()
    lane_blocks = _chunk(math.ceil(lanes / COLS), most // dy_panel)
    depth_tiles = _chunk(math.ceil(depth / tiling.depth), most // x_panel)
    chunks = g.groups * math.ceil(lanes / COLS / lane_blocks)
    chunks *= math.ceil(math.ceil(depth / tiling.depth) / depth_tiles)
    steps = math.ceil(rows / row_block) * math.ceil(g.images / image_block)
    parts = min(steps, math.ceil(units / chunks))
    room = lane_blocks * dy_panel + depth_tiles * x_panel + LANES * LANES
    items = min(units, chunks * parts)
    return _Blocks(image_block, row_block, lane_blocks, depth_tiles, parts, items, room)


def _chunk(count: int, most: int) -> int:
    """Return the size of equal chunks of at most `most`."""
    return math.ceil(count / math.ceil(count / max(1, most)))
