"""Convolutions of small images with many channels: launches of `kernels/cpu/small_images.cl`."""

from __future__ import annotations

import math

from ..lower.builder import Builder
from ..lower.expr import Expr, Value
from ..lower.product import Geometry
from ..lower.signature import Argument

FILES = ("cpu/common.cl", "cpu/unpacked.cl", "cpu/small_images.cl")
COLS, FEW, LANES = 32, 4, 16
"""Columns and least rows of a product's tile, and floats of a vector, as in the kernels."""
LEAST_LANES = 2
"""Least ratio of output channels to pixels at which copies of patches pay."""
CHUNK = 48
"""Rows per work-item."""


def suits(g: Geometry) -> bool:
    """Return whether copies of patches cost less than copies of weights, because pixels are few."""
    lanes, depth = g.channels()
    pixels = g.images * math.prod(g.out_size)
    wide = depth * math.prod(g.kernel) >= COLS
    return g.groups == 1 and wide and min(lanes, pixels) >= FEW and LEAST_LANES * pixels <= lanes


def forward(builder: Builder, g: Geometry, x: Value, weight: Value, bias: Value | None) -> Value:
    """Return y [N][Co][OH][OW] for x [N][Ci][H][W]."""
    taps, pixels = g.in_channels * math.prod(g.kernel), g.images * math.prod(g.out_size)
    panels = math.ceil(pixels / COLS)
    patches = builder.new((panels, taps, COLS), "float32")
    _launch(
        builder, "patches_of_rows", (panels, math.prod(g.kernel)),
        {"x": x, "patches": patches, "images": g.images, **_window(g)},
    )  # fmt: skip
    y = builder.new((g.out_channels, panels * COLS), "float32")
    _multiply(builder, weight, patches, y, taps, COLS, taps)
    shape = (g.out_channels, g.images, *g.out_size)
    seen = builder.view(builder.pool.load(y), lambda layout: layout.narrow(1, 0, pixels))
    seen = builder.view(seen, lambda layout: layout.reshape(shape))
    return _stored(builder, builder.view(seen, lambda layout: layout.permute((1, 0, 2, 3))), bias)


def input_gradient(
    builder: Builder, g: Geometry, dy: Value, weight: Value, bias: Value | None
) -> Value:
    """Return dx [N][Ci][H][W], plus a bias per channel."""
    taps, pixels = g.in_channels * math.prod(g.kernel), g.images * math.prod(g.out_size)
    patches = builder.new((pixels, taps), "float32")
    by_pixel = _permuted(builder, dy, (0, 2, 3, 1))
    _multiply(builder, by_pixel, weight, patches, g.out_channels, taps, 1)
    dx = builder.new((g.images, g.in_channels, *g.size), "float32")
    _launch(
        builder, "fold_patches", (g.images, math.ceil(g.in_channels / LANES)),
        {"patches": patches, "dx": dx, **_window(g)},
    )  # fmt: skip
    return _stored(builder, builder.pool.load(dx), bias)


def weight_gradient(builder: Builder, g: Geometry, x: Value, dy: Value) -> Value:
    """Return dw [Co][Ci][kh][kw]."""
    taps, pixels = g.in_channels * math.prod(g.kernel), g.images * math.prod(g.out_size)
    patches = builder.new((pixels, taps), "float32")
    _launch(builder, "patches_of_pixels", (pixels, 1), {"x": x, "patches": patches, **_window(g)})
    dw = builder.new((g.out_channels, g.in_channels, *g.kernel), "float32")
    _multiply(builder, _permuted(builder, dy, (1, 0, 2, 3)), patches, dw, pixels, taps, 1)
    return dw


def _permuted(builder: Builder, value: Value, order: tuple[int, ...]) -> Value:
    loaded = builder.pool.load(value)
    return builder.store(builder.view(loaded, lambda layout: layout.permute(order)))


def _stored(builder: Builder, y: Expr, bias: Value | None) -> Value:
    if bias is not None:
        channels = (y.shape[1], 1, 1)
        shift = builder.view(builder.pool.load(bias), lambda layout: layout.reshape(channels))
        y = builder.apply("{0} + {1}", "float32", y, builder.expand(shift, y.shape))
    return builder.store(y)


def _multiply(
    builder: Builder, a: Value, b: Value, out: Value, depth: int, b_row: int, b_col: int
) -> None:
    """Compute out [rows][cols] = a [rows][depth] times b.

    Rows of b are `b_row` elements apart. The `COLS` columns of a panel are adjacent in memory; the
    panel of column c and the next ones begins `c * b_col` elements after the beginning of b.
    """
    rows = math.prod(a.shape) // depth
    cols = math.prod(out.shape) // rows
    _launch(
        builder, "multiply", (cols // COLS, max(1, rows // CHUNK)),
        {
            "a": a, "b": b, "out": out, "rows": rows, "depth": depth, "cols": cols, "chunk": CHUNK,
            "b_row": b_row, "b_col": b_col,
        },
    )  # fmt: skip


def _window(g: Geometry) -> dict[str, Argument]:
    return {"depth": g.in_channels, **g.sizes, **g.window}


def _launch(builder: Builder, name: str, size: tuple[int, int], args: dict[str, Argument]) -> None:
    builder.launch(builder.device.kernel(name, FILES), size, args)
