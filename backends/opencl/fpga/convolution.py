"""Convolutions on FPGAs: products whose operands are read at computed places."""

from __future__ import annotations

from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.geometry import Geometry
from ..lower.signature import Argument
from .dataflow import launch


def forward(builder: Builder, g: Geometry, x: Value, weight: Value, bias: Value | None) -> Value:
    """Compute y [N][Co][OH][OW] from x [N][Ci][H][W]."""
    lanes, depth = g.channels()
    taps, pixels = g.kernel[0] * g.kernel[1], g.out_size[0] * g.out_size[1]
    return _launch(
        builder, "convolution", g, (g.images, g.out_channels, *g.out_size), {"x": x, "w": weight},
        (lanes, g.images * pixels, depth * taps), _bias(bias, x),
    )  # fmt: skip


def input_gradient(
    builder: Builder, g: Geometry, dy: Value, weight: Value, bias: Value | None = None
) -> Value:
    """Compute dx [N][Ci][H][W]."""
    lanes, depth = g.channels()
    taps, pixels = g.kernel[0] * g.kernel[1], g.size[0] * g.size[1]
    return _launch(
        builder, "convolution_input", g, (g.images, g.in_channels, *g.size),
        {"dy": dy, "w": weight}, (depth, g.images * pixels, lanes * taps), _bias(bias, dy),
    )  # fmt: skip


def weight_gradient(builder: Builder, g: Geometry, x: Value, dy: Value) -> Value:
    """Compute dw [Co][Ci / groups][kh][kw]."""
    lanes, depth = g.channels()
    taps, pixels = g.kernel[0] * g.kernel[1], g.out_size[0] * g.out_size[1]
    return _launch(
        builder, "convolution_weight", g, (g.out_channels, depth, *g.kernel),
        {"dy": dy, "x": x}, (lanes, depth * taps, g.images * pixels), {},
    )  # fmt: skip


def _launch(
    builder: Builder, name: str, g: Geometry, shape: tuple[int, ...],
    operands: dict[str, Argument], size: tuple[int, int, int], added: dict[str, Argument],
) -> Value:  # fmt: skip
    rows, cols, depth = size
    files = ("patches.cl", "fpga/places.cl", f"fpga/{name}.cl")
    return launch(
        builder, name, files, shape, {**operands, **g.arguments},
        {"batches": g.groups, "rows": rows, "cols": cols, "depth": depth},
        {**added, **g.arguments}, by_channel=name != "convolution_weight",
    )  # fmt: skip


def _bias(bias: Value | None, stand_in: Value) -> dict[str, Argument]:
    return {"bias": bias or stand_in, "has_bias": int(bias is not None)}
