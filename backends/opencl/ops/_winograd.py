"""3x3 convolutions of stride 1 by minimal filtering: the launches of `kernels/cpu/winograd.cl`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ..builder import Builder, Kernel, Value
from ..geometry import Geometry
from ._convolution import Axis

if TYPE_CHECKING:
    from .convolution import ChannelsLast

COLS, ROWS = 32, 12
"""The register tile of the products, as in the kernels: output channels, tiles."""
LANES = 16
SIDE = 4
"""Outputs of a tile, in rows and columns."""
POINTS = (SIDE + 2) ** 2
CHANNELS = 64
"""Input channels that one work-item transforms."""
WORK_NBYTES = 8 << 20
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
    return tiles >= ROWS


def reach(g: Geometry, axes: tuple[Axis, Axis], flipped: bool) -> tuple[Axis, Axis]:
    """The axes with as many outputs as the kernels compute: whole tiles."""
    if not suits(g, axes, flipped):
        return axes
    h, w = (replace(axis, outputs=tiles_of(axis) * SIDE) for axis in axes)
    return h, w


def convolve(
    builder: Builder, g: Geometry, copy: ChannelsLast, packed: Value, bias: Value | None, y: Value,
    axes: tuple[Axis, Axis], flipped: bool,
) -> None:  # fmt: skip
    """y of the channels-last copy, whose border must reach as far as whole tiles read."""
    lanes, depth = g.channels(flipped)
    h, w = axes
    tile_rows, tile_cols = tiles_of(h), tiles_of(w)
    blocks = math.ceil(lanes / COLS)
    depth_stride, lane_stride = (math.ceil(depth / LANES) + 1) * LANES, blocks * COLS + LANES
    total = g.images * tile_rows
    turn = _tile_rows_at_once(total, tile_cols, depth_stride + lane_stride)
    tiles = turn * tile_cols
    weights = _weights(builder, packed, axes, depth, blocks)
    inputs = builder.new((POINTS, tiles, depth_stride), "float32")
    products = builder.new((tiles, POINTS, lane_stride), "float32")
    height, width = y.shape[2:]
    for at in range(0, total, turn):
        place = {"first_row": min(at, total - turn), "tile_rows": tile_rows, "tile_cols": tile_cols}
        builder.launch(
            _kernel(builder, "winograd_input"), (turn, math.ceil(depth / CHANNELS), 1), ONE,
            {
                "padded": copy.value, "inputs": inputs, "x_offset": copy.offset(h.start, w.start),
                "x_image": copy.image, "x_row": copy.row, "depth": depth, **place,
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


def _tile_rows_at_once(total: int, tile_cols: int, strides: int) -> int:
    """Tile rows whose intermediates fit, as whole register tiles."""
    whole = ROWS // math.gcd(ROWS, tile_cols)
    most = WORK_NBYTES // (4 * POINTS * strides * tile_cols)
    turns = math.ceil(total / max(whole, most))
    return min(total, math.ceil(total / turns / whole) * whole)


def _kernel(builder: Builder, name: str) -> Kernel:
    return Kernel(builder.source("cpu/common.cl") + builder.source("cpu/winograd.cl"), name)
