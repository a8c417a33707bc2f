"""Convolutions on CPUs as products of weights and pixels: 1x1 kernels and input gradients.

For an input gradient, the product has a row for each input channel and position in the kernel.
Unless the kernel is 1x1 with stride 1, a second kernel adds (folds) the rows into the image.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from ..lower.builder import Builder
from ..lower.expr import Expr, Layout, Value
from ..lower.product import Geometry, Operand
from ._common import optional
from .matmul import COLS, pack

FILES = ("cpu/common.cl", "cpu/matmul.cl", "cpu/pointwise.cl")
ROOM_PANELS = 4
"""A work-item's share of a second-level cache holds this many panels of `tuning.depth_block` rows.

A panel has `COLS` pixels, and a row for each channel.
"""
MOST_PANELS = 16
"""Most panels per block: MOST_COLS of `kernels/cpu/pointwise.cl`, divided by COLS."""
FEW_CHANNELS = 8
"""With at most this many input channels, other kernels leave most lanes of their tiles empty."""
MOST_GROWTH = 3
"""Largest size of a product to fold, divided by the size of dy."""


def is_pointwise(g: Geometry) -> bool:
    """Return whether a convolution is a product of its weights with pixels on a grid."""
    return g.kernel == (1, 1) and g.padding == (0, 0)


def folds(g: Geometry) -> bool:
    """Return whether `folded_gradient` is the best way to compute the input gradient."""
    lanes, depth = g.channels(flipped=True)
    small = lanes * math.prod(g.kernel) <= MOST_GROWTH * depth
    return is_pointwise(g) or (lanes <= FEW_CHANNELS and small)


def sampled(builder: Builder, g: Geometry, x: Value) -> tuple[Geometry, Value]:
    """Return an equal convolution with stride 1, and its input: `x` or a copy of some pixels."""
    if g.stride == (1, 1):
        return g, x
    seen: Expr = builder.pool.load(x)
    for dim in (0, 1):
        length, step = g.out_size[dim], g.stride[dim]
        every = partial(Layout.narrow, dim=2 + dim, start=0, length=length, step=step)
        seen = builder.view(seen, every)
    return _plain(g), builder.store(seen)


def pointwise(builder: Builder, g: Geometry, x: Value, weight: Value, bias: Value | None) -> Value:
    """Return y [N][Co][OH][OW] for x [N][Ci][H][W]."""
    rows, depth = g.channels()
    left = Operand(weight, 0, rows * depth, depth, 1)
    y = builder.new((g.images, g.out_channels, *g.out_size), "float32")
    _product(builder, g, left, x, bias, y)
    return y


def folded_gradient(
    builder: Builder, g: Geometry, dy: Value, weight: Value, bias: Value | None
) -> Value:
    """Return dx [N][Ci][H][W] for dy [N][Co][OH][OW], plus a bias per channel."""
    lanes, depth = g.channels(flipped=True)
    rows = lanes * math.prod(g.kernel)
    left = Operand(weight, 0, rows * depth, 1, rows)
    dx = builder.new((g.images, g.in_channels, *g.size), "float32")
    if is_pointwise(g) and g.stride == (1, 1):
        _product(builder, _plain(g), left, dy, bias, dx)
        return dx
    taps = builder.new((g.images, g.groups * rows, *g.out_size), "float32")
    _product(builder, _plain(g), left, dy, None, taps)
    (rows, cols), (height, width) = g.out_size, g.size
    builder.launch(
        builder.device.kernel("fold", FILES, "EPILOGUE"), (g.images, g.in_channels),
        {
            "x": taps, **optional(builder, "bias", bias, taps), "y": dx,
            "rows": rows, "cols": cols, "height": height, "width": width, **g.window,
        },
    )  # fmt: skip
    return dx


def _product(
    builder: Builder, g: Geometry, a: Operand, x: Value, bias: Value | None, y: Value
) -> None:
    """Compute y [N][groups * rows][OH][OW] from x [N][groups * depth][H][W], a: rows x depth."""
    rows, depth = y.shape[1] // g.groups, x.shape[1] // g.groups
    all_panels = math.ceil(g.images * math.prod(g.out_size) / COLS)
    units = builder.device.compute_units
    room = ROOM_PANELS * builder.device.tuning.depth_block
    most = min(MOST_PANELS, room // depth, math.ceil(all_panels / units))
    blocks = math.ceil(all_panels / max(1, most))
    panels = math.ceil(all_panels / blocks)
    items = min(units, g.groups * blocks)
    left = pack(builder, "left", a, rows, depth, g.groups)
    builder.launch(
        builder.device.kernel("pointwise", FILES, "EPILOGUE"), (items,),
        {
            "left": left, "x": x, **optional(builder, "bias", bias, x), "y": y,
            "room": builder.new((items, panels, depth, COLS), "float32"), "images": g.images,
            "groups": g.groups, "rows": rows, "depth": depth, "panels": panels,
            **g.sizes, **g.pairs("stride"),
        },
    )  # fmt: skip


def _plain(g: Geometry) -> Geometry:
    """Return `g` with stride 1 and with images as large as its result."""
    return replace(g, size=g.out_size, stride=(1, 1))
