"""Convolutions on GPUs: products whose operands are read at computed places."""

from __future__ import annotations

from ..builder import Builder, Value
from ..expr import Load
from ..geometry import Geometry
from ..reduce import SUM, reduce
from ..signature import Argument
from .tiles import in_parts, launch, tiles_of


def forward(builder: Builder, g: Geometry, x: Value, weight: Value, bias: Value | None) -> Value:
    """y [N][Co][OH][OW] of x [N][Ci][H][W]."""
    lanes, depth = g.channels()
    taps, pixels = g.kernel[0] * g.kernel[1], g.out_size[0] * g.out_size[1]
    tiles = tiles_of(builder.device, lanes, g.images * pixels, depth * taps, g.groups)
    return launch(
        builder, "convolution", "forward", tiles, (g.images, g.out_channels, *g.out_size),
        {"x": x, "w": weight, **_bias(bias, x), **_shape(g)},
    )  # fmt: skip


def input_gradient(
    builder: Builder, g: Geometry, dy: Value, weight: Value, bias: Value | None = None
) -> Value:
    """dx [N][Ci][H][W]."""
    lanes, depth = g.channels()
    taps, pixels = g.kernel[0] * g.kernel[1], g.size[0] * g.size[1]
    tiles = tiles_of(builder.device, depth, g.images * pixels, lanes * taps, g.groups)
    return launch(
        builder, "convolution", "input_gradient", tiles, (g.images, g.in_channels, *g.size),
        {"dy": dy, "w": weight, **_bias(bias, dy), **_shape(g)},
    )  # fmt: skip


def weight_gradient(builder: Builder, g: Geometry, x: Value, dy: Value) -> Value:
    """dw [Co][Ci / groups][kh][kw]."""
    lanes, depth = g.channels()
    taps, pixels = g.kernel[0] * g.kernel[1], g.out_size[0] * g.out_size[1]
    target = builder.device
    tiles = tiles_of(target, lanes, depth * taps, g.images * pixels, g.groups)
    tiles = in_parts(tiles, target)
    return launch(
        builder, "convolution", "weight_gradient", tiles, (g.out_channels, depth, *g.kernel),
        {"dy": dy, "x": x, **_shape(g), "each": tiles.each},
    )  # fmt: skip


def bias_gradient(builder: Builder, dy: Value) -> Value:
    """db [C] of dy [N][C][H][W]."""
    load = builder.pool.load(dy)
    assert isinstance(load, Load)
    return reduce(builder, load, [0, 2, 3], SUM)


def _bias(bias: Value | None, stand_in: Value) -> dict[str, Argument]:
    return {"bias": bias or stand_in, "has_bias": int(bias is not None)}


def _shape(g: Geometry) -> dict[str, Argument]:
    return {
        "images": g.images, "groups": g.groups, "in_channels": g.in_channels,
        "out_channels": g.out_channels, "height": g.size[0], "width": g.size[1],
        "out_height": g.out_size[0], "out_width": g.out_size[1], "kernel_h": g.kernel[0],
        "kernel_w": g.kernel[1], "stride_h": g.stride[0], "stride_w": g.stride[1],
        "pad_h": g.padding[0], "pad_w": g.padding[1], "dilation_h": g.dilation[0],
        "dilation_w": g.dilation[1],
    }  # fmt: skip
