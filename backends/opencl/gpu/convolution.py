"""Convolutions on GPUs: products whose operands are read at computed places."""

from __future__ import annotations

from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.geometry import Geometry
from ..lower.signature import Argument
from .tiles import in_parts, launch, tiles_of

FILES = ("patches.cl", "gpu/convolution.cl")


def forward(builder: Builder, g: Geometry, x: Value, weight: Value, bias: Value | None) -> Value:
    """Compute y [N][Co][OH][OW] from x [N][Ci][H][W]."""
    lanes, depth = g.channels()
    taps, pixels = g.kernel[0] * g.kernel[1], g.out_size[0] * g.out_size[1]
    tiles = tiles_of(builder.device, lanes, g.images * pixels, depth * taps, g.groups)
    return launch(
        builder, FILES, "forward", tiles, (g.images, g.out_channels, *g.out_size),
        {"x": x, "w": weight, **_bias(bias, x), **g.arguments},
    )  # fmt: skip


def input_gradient(
    builder: Builder, g: Geometry, dy: Value, weight: Value, bias: Value | None = None
) -> Value:
    """Compute dx [N][Ci][H][W]."""
    lanes, depth = g.channels()
    taps, pixels = g.kernel[0] * g.kernel[1], g.size[0] * g.size[1]
    tiles = tiles_of(builder.device, depth, g.images * pixels, lanes * taps, g.groups)
    return launch(
        builder, FILES, "input_gradient", tiles, (g.images, g.in_channels, *g.size),
        {"dy": dy, "w": weight, **_bias(bias, dy), **g.arguments},
    )  # fmt: skip


def weight_gradient(builder: Builder, g: Geometry, x: Value, dy: Value) -> Value:
    """Compute dw [Co][Ci / groups][kh][kw]."""
    lanes, depth = g.channels()
    taps, pixels = g.kernel[0] * g.kernel[1], g.out_size[0] * g.out_size[1]
    target = builder.device
    tiles = tiles_of(target, lanes, depth * taps, g.images * pixels, g.groups)
    tiles = in_parts(tiles, target)
    return launch(
        builder, FILES, "weight_gradient", tiles, (g.out_channels, depth, *g.kernel),
        {"dy": dy, "x": x, **g.arguments, "each": tiles.each},
    )  # fmt: skip


def _bias(bias: Value | None, stand_in: Value) -> dict[str, Argument]:
    return {"bias": bias or stand_in, "has_bias": int(bias is not None)}
