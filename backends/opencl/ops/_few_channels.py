"""Convolutions of few input channels on CPUs: launches of `kernels/cpu/few_channels.cl`."""

from __future__ import annotations

import math

from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.product import Geometry, Operand
from ._common import optional
from .matmul import COLS, ROWS, pack

FILES = ("cpu/common.cl", "cpu/few_channels.cl")
MOST_CHANNELS = 8
LEAST_SHARE = 0.75
BAND = 8
"""Rows of the result per work-item."""


def suits(g: Geometry) -> bool:
    """Return whether input channels are few, and pixels fill vectors about as well as channels.

    "About" means to at least `LEAST_SHARE` of what channels fill.
    """
    lanes, depth = g.channels()
    width = g.out_size[1]
    rows = 1 if lanes == 1 else math.ceil(lanes / 4) * 4
    pixels = width / (math.ceil(width / COLS) * COLS) * lanes / rows
    return depth <= MOST_CHANNELS and pixels >= LEAST_SHARE * lanes / (
        math.ceil(lanes / COLS) * COLS
    )


def forward(builder: Builder, g: Geometry, x: Value, weight: Value, bias: Value | None) -> Value:
    """Return y [N][Co][OH][OW] for x [N][Ci][H][W]."""
    lanes, depth = g.channels()
    rows, cols = g.extent(g.out_size[0], math.ceil(g.out_size[1] / COLS) * COLS)
    cols = math.ceil(cols / g.stride[1])
    padded = builder.new((g.images, g.in_channels, rows, g.stride[1], cols), "float32")
    builder.launch(
        builder.device.kernel("pad_rows", FILES), (rows, g.images * g.in_channels),
        {
            "x": x, "padded": padded, "height": g.size[0], "width": g.size[1],
            "top": g.padding[0], "left": g.padding[1], "stride_w": g.stride[1], "cols": cols,
        },
    )  # fmt: skip
    taps = depth * math.prod(g.kernel)
    weights = Operand(weight, 0, lanes * taps, taps, 1)
    y = builder.new((g.images, g.out_channels, *g.out_size), "float32")
    builder.launch(
        builder.device.kernel("convolve_rows", FILES),
        (math.ceil(lanes / ROWS), math.ceil(g.out_size[0] / BAND), g.images * g.groups),
        {
            "padded": padded,
            "left": pack(builder, "left", weights, lanes, taps, g.groups),
            **optional(builder, "bias", bias, padded), "y": y, "groups": g.groups,
            "depth": depth, "lanes": lanes, "rows": rows, "cols": cols,
            "out_height": g.out_size[0], "out_width": g.out_size[1],
            **g.pairs("kernel", "stride", "dilation"), "band": BAND,
        },
    )  # fmt: skip
    return y
