"""3x3 convolutions of stride 1 by minimal filtering: the launches of `kernels/cpu/winograd.cl`."""

from __future__ import annotations

import math
import os

from ..builder import Builder, Kernel, Value
from ..geometry import Geometry
from ._convolution import Axis

COLS, ROWS = 32, 12
"""The register tile of the products, as in the kernels: output channels, tiles."""
LANES = 16
SIDE = 4
"""Outputs of a tile, in rows and columns."""
POINTS = (SIDE + 2) ** 2
WORK_NBYTES = int(os.environ.get('WN', 0))
LEAST=int(os.environ.get('LEAST',6<<20))
MOST=20<<20
"""Memory of transformed inputs and of products: tile rows are done in turns that fit."""
ONE = (1, 1, 1)


def tiles_of(axis: Axis) -> int:
    """Tiles along one dimension."""
    return math.ceil(axis.outputs / SIDE)


def suits(g: Geometry, axes: tuple[Axis, Axis], flipped: bool) -> bool:
    """Whether minimal filtering computes this convolution, and sooner than the direct kernel."""
    lanes, depth = g.channels(flipped)
    if g.groups > 1 or any((a.taps, a.x_step, a.tap_step, a.y_step) != (3, 1, 1, 1) for a in axes):
        return False
    tiles = g.images * tiles_of(axes[0]) * tiles_of(axes[1])
    return tiles >= 4 and depth >= LANES


def convolve(
    builder: Builder, g: Geometry, x: Value, packed: Value, bias: Value | None, y: Value,
    axes: tuple[Axis, Axis], flipped: bool,
) -> None:  # fmt: skip
    """y [N][lanes][height][width] of x [N][depth][height][width]."""
    lanes, depth = g.channels(flipped)
    h, w = axes
    tile_rows, tile_cols = tiles_of(h), tiles_of(w)
    blocks = math.ceil(lanes / COLS)
    depth_stride, lane_stride = (math.ceil(depth / LANES) + 1) * LANES, blocks * COLS + LANES
    total = g.images * tile_rows
    turn = _tile_rows_at_once(total, tile_cols, depth_stride + lane_stride, 4*POINTS*blocks*depth*COLS)
    tiles = turn * tile_cols
    weights = _weights(builder, packed, axes, depth, blocks)
    inputs = builder.new((POINTS, tiles, depth_stride), "float32")
    products = builder.new((tiles, POINTS, lane_stride), "float32")
    height, width = y.shape[2:]
    for at in range(0, total, turn):
        place = {"first_row": min(at, total - turn), "tile_rows": tile_rows, "tile_cols": tile_cols}
        builder.launch(
            _kernel(builder, "winograd_input"), (turn, math.ceil(depth / LANES), 1), ONE,
            {
                "x": x, "inputs": inputs, "images": g.images, "depth": depth, "height": x.shape[2],
                "width": x.shape[3], "top": h.start, "left": w.start, **place,
                "depth_stride": depth_stride,
            },
        )  # fmt: skip
        builder.launch(
            _kernel(builder, "winograd_multiply"), (blocks, POINTS, 1), ONE,
            {
                "inputs": inputs, "weights": weights, "products": products, "tiles": tiles,
                "depth": depth, "depth_stride": depth_stride, "lane_stride": lane_stride,
            },
        )  # fmt: skip
        builder.launch(
            _kernel(builder, "winograd_output"), (turn, math.ceil(lanes / LANES), 1), ONE,
            {
                "products": products, "bias": bias or products, "has_bias": int(bias is not None),
                "y": y, **place, "lanes": lanes, "lane_stride": lane_stride, "height": height,
                "width": width,
            },
        )  # fmt: skip


def _weights(
    builder: Builder, packed: Value, axes: tuple[Axis, Axis], depth: int, blocks: int
) -> Value:
    """[POINTS][blocks][depth][COLS] of weights that are packed by taps."""
    h, w = axes
    weights = builder.new((POINTS, blocks, depth, COLS), "float32")
    builder.launch(
        _kernel(builder, "winograd_weights"), (blocks, math.ceil(depth / LANES), 1), ONE,
        {
            "packed": packed, "weights": weights, "depth": depth, "first": 3 * h.first + w.first,
            "step_h": 3 * h.step, "step_w": w.step,
        },
        steady=builder.steady(packed),
    )  # fmt: skip
    return weights


def _tile_rows_at_once(total: int, tile_cols: int, strides: int, weights: int) -> int:
    """Tile rows whose intermediates fit, and that waste least: all turns have as many."""
    least = math.ceil(4 / tile_cols)
    room = WORK_NBYTES or max(LEAST, min(weights // 2, MOST))
    most = max(least, room // (4 * POINTS * strides * tile_cols))

    def computed(turn: int) -> tuple[int, int]:
        turns = math.ceil(total / turn)
        return turns * math.ceil(turn * tile_cols / 4), turns

    return min(range(least, min(total, most) + 1), key=computed)


def _kernel(builder: Builder, name: str) -> Kernel:
    return Kernel(builder.source("cpu/common.cl") + builder.source("cpu/winograd.cl"), name)
