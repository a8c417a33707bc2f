"""Two-dimensional convolution and its gradients; one-dimensional images have one row.

The direct kernel computes the forward and the input gradient: both sum taps of a channels-last
copy. `Axis` has their differences in one dimension: the taps, their start and the results' places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from torch import fx

from ..fpga.dataflow import systolic_patches
from ..gpu.tiles import tiled_patches
from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.launch import Kernel
from ..lower.product import Geometry, Patches
from ..lower.reduce import reduce
from ..lower.reductions import SUM
from ..lower.registry import lowers
from . import _few_channels, _small_images, _weight_gradient, _winograd
from ._common import arguments, optional
from ._convolution import Axis, choose_tile, forward_axis, geometry_of, gradient_axes, why_not
from ._pointwise import folded_gradient, folds, is_pointwise, pointwise, sampled

COLS = 32
"""Output channels of a register tile, as in the kernels."""
LANES = 16
BAND_PIXELS = 1024
"""Approximate number of pixels that a work-item of the layout kernel copies."""
TURN_NBYTES = 4 << 20
"""Bytes for copied images, which should stay in the last-level cache."""
BY_PATCHES = {"gpu": tiled_patches, "fpga": systolic_patches}
"""Families whose products read patches directly from the images, see `kernels/patches.cl`."""


@dataclass(frozen=True)
class ChannelsLast:
    """A copy [N][rows][cols][channels] of images, which begin at (top, left) of the copy."""

    value: Value
    rows: int
    cols: int
    channels: int
    top: int
    left: int
    first: int = 0
    """Index of the copy's first image among all images."""

    @property
    def row(self) -> int:
        """Floats per row."""
        return self.cols * self.channels

    @property
    def image(self) -> int:
        """Floats per image."""
        return self.rows * self.row

    def offset(self, h: int, w: int) -> int:
        """Return the number of floats before pixel (h, w) of the first image or its border."""
        return (h + self.top) * self.row + (w + self.left) * self.channels


def channels_last(
    builder: Builder, value: Value, axes: list[tuple[Axis, Axis]], first: int, images: int
) -> ChannelsLast:
    """Copy `images` images, from `first` on, as channels last with the border that `axes` read."""
    channels, *size = value.shape[1:]
    top, left, rows, cols = _bordered(size, axes)
    band = min(rows, max(1, BAND_PIXELS // cols))
    copy = builder.new((images, rows, cols, channels), "float32")
    builder.launch(
        _kernel("layout", "pad_channels_last"),
        (math.ceil(channels / LANES), math.ceil(rows / band), images),
        {
            "x": value, "padded": copy, "channels": channels, "height": size[0], "width": size[1],
            "rows": rows, "cols": cols, "top": top, "left": left, "band": band,
            "first_image": first,
        },
    )  # fmt: skip
    return ChannelsLast(copy, rows, cols, channels, top, left, first)


def _bordered(size: Sequence[int], axes: list[tuple[Axis, Axis]]) -> tuple[int, int, int, int]:
    """Return (top, left, rows, cols) of images with their border."""
    top, left = (max(0, -min((pair[i].start for pair in axes), default=0)) for i in (0, 1))
    rows, cols = (
        border + max([size[i], *(pair[i].end for pair in axes)])
        for i, border in ((0, top), (1, left))
    )
    return top, left, rows, cols


def forward(builder: Builder, g: Geometry, x: Value, weight: Value, bias: Value | None) -> Value:
    """Return y [N][Co][OH][OW] for x [N][Ci][H][W]."""
    if (family := BY_PATCHES.get(builder.device.family)) is not None:
        return family(builder, Patches("forward", g, {"x": x, "w": weight}, bias))
    if is_pointwise(g):
        return pointwise(builder, g, x, weight, bias)
    if _winograd.suits(g, flipped=False):
        return _winograd.convolve(builder, g, x, weight, bias, flipped=False)
    if _small_images.suits(g):
        return _small_images.forward(builder, g, x, weight, bias)
    if _few_channels.suits(g):
        return _few_channels.forward(builder, g, x, weight, bias)
    axes = [(forward_axis(g, 0), forward_axis(g, 1))]
    return _direct(builder, g, x, weight, bias, axes, flipped=False)


def input_gradient(
    builder: Builder, g: Geometry, dy: Value, weight: Value, bias: Value | None
) -> Value:
    """Return dx [N][Ci][H][W] for dy [N][Co][OH][OW], plus a bias per channel."""
    if (family := BY_PATCHES.get(builder.device.family)) is not None:
        return family(builder, Patches("input_gradient", g, {"dy": dy, "w": weight}, bias))
    if folds(g):
        return folded_gradient(builder, g, dy, weight, bias)
    if _winograd.suits(g, flipped=True):
        return _winograd.convolve(builder, g, dy, weight, bias, flipped=True)
    if _small_images.suits(g):
        return _small_images.input_gradient(builder, g, dy, weight, bias)
    axes = list(product(gradient_axes(g, 0), gradient_axes(g, 1)))
    return _direct(builder, g, dy, weight, bias, axes, flipped=True)


def weight_gradient(builder: Builder, g: Geometry, x: Value, dy: Value) -> Value:
    """Return dw [Co][Ci / groups][kh][kw] for x [N][Ci][H][W] and dy [N][Co][OH][OW]."""
    if (family := BY_PATCHES.get(builder.device.family)) is not None:
        return family(builder, Patches("weight_gradient", g, {"dy": dy, "x": x}))
    if is_pointwise(g):
        g, x = sampled(builder, g, x)
    elif _small_images.suits(g):
        return _small_images.weight_gradient(builder, g, x, dy)
    return _weight_gradient.weight_gradient(builder, g, x, dy)


def _direct(
    builder: Builder, g: Geometry, x: Value, weight: Value, bias: Value | None,
    all_axes: list[tuple[Axis, Axis]], flipped: bool,
) -> Value:  # fmt: skip
    """Return y, the sum over taps of x [N][C][.][.]; each pair of axes computes a part of y.

    The larger of images and weights is read once. The smaller is read again for each block of the
    larger, and so stays in a cache. Large images are copied in turns, and a turn stays in a cache.
    """
    y = builder.new((g.images, g.in_channels, *g.size) if flipped else
                    (g.images, g.out_channels, *g.out_size), "float32")  # fmt: skip
    packed = pack_weights(builder, g, weight, flipped)
    _, _, rows, cols = _bordered(x.shape[2:], all_axes)
    image, turn = x.shape[1] * rows * cols, g.images
    if _are_larger(g, image, packed):
        most = min(g.images, max(1, TURN_NBYTES // (4 * image)))
        turn = next(n for n in range(most, 0, -1) if g.images % n == 0)
    for first in range(0, g.images, turn):
        copy = channels_last(builder, x, all_axes, first, turn)
        for axes in all_axes:
            _convolve(builder, g, copy, packed, bias, y, axes, flipped)
    return y


def _are_larger(g: Geometry, image: int, packed: Value) -> bool:
    """Return whether all images, of `image` floats each, are larger than the packed weights."""
    return g.images * image > math.prod(packed.shape)


def _convolve(
    builder: Builder, g: Geometry, copy: ChannelsLast, packed: Value, bias: Value | None,
    y: Value, axes: tuple[Axis, Axis], flipped: bool,
) -> None:  # fmt: skip
    images, blocks_first = copy.value.shape[0], _are_larger(g, copy.image, packed)
    lanes, depth = g.channels(flipped)
    blocks = math.ceil(lanes / COLS)
    h, w = axes
    tap, height = depth * COLS, g.out_size[0] if flipped else g.size[0]
    tile = choose_tile(images, h.outputs, w.outputs)
    channels, out_h, out_w = y.shape[1:]
    row_tiles, col_tiles = math.ceil(h.outputs / tile[1]), math.ceil(w.outputs / tile[2])
    macros = [f"TILE_{name}={n}" for name, n in zip(("IMAGES", "ROWS", "COLS"), tile, strict=True)]
    size = (row_tiles * col_tiles, math.ceil(images / tile[0]), g.groups * blocks)
    size = (size[2], *size[:2]) if blocks_first else size
    builder.launch(
        _kernel("convolution", "convolve", *macros), size,
        {
            "packed": packed, **optional(builder, "bias", bias, copy.value), "y": y,
            "images": images, "rows": h.outputs, "cols": w.outputs, "depth": depth,
            "channels": lanes, "blocks": blocks, "taps_h": h.taps, "taps_w": w.taps,
            "padded": copy.value, "x_offset": copy.offset(h.start, w.start),
            "x_image": copy.image, "x_row": h.x_step * copy.row, "x_col": w.x_step * copy.channels,
            "tap_row": h.tap_step * copy.row, "tap_col": w.tap_step * copy.channels,
            "first_row": h.start, "row_step": h.x_step, "tap_step": h.tap_step, "height": height,
            "kernel_size": g.kernel[0] * g.kernel[1],
            "w_offset": (h.first * g.kernel[1] + w.first) * tap,
            "w_row": h.step * g.kernel[1] * tap, "w_col": w.step * tap,
            "y_offset": copy.first * channels * out_h * out_w + h.y_start * out_w + w.y_start,
            "blocks_first": int(blocks_first), "y_image": channels * out_h * out_w,
            "y_channel": out_h * out_w, "y_row": h.y_step * out_w, "y_col": w.y_step,
        },
    )  # fmt: skip


def pack_weights(builder: Builder, g: Geometry, weight: Value, flipped: bool) -> Value:
    """Pack weights by blocks of output channels, or of input channels if `flipped`."""
    taps = g.kernel[0] * g.kernel[1]
    lanes, depth = g.channels(flipped)
    lane_stride, depth_stride = g.in_channels // g.groups * taps, taps
    if flipped:
        lane_stride, depth_stride = depth_stride, lane_stride
    blocks = math.ceil(lanes / COLS)
    packed = builder.new((g.groups * blocks, taps, depth, COLS), "float32")
    builder.launch(
        _kernel("layout", "pack_weights"),
        (g.groups * blocks, math.ceil(depth / LANES)),
        {
            "w": weight, "packed": packed, "size": math.prod(weight.shape),
            "group_stride": math.prod(weight.shape) // g.groups, "lane_stride": lane_stride,
            "depth_stride": depth_stride, "lanes": lanes, "blocks": blocks, "depth": depth,
            "taps": taps,
        },
        steady=builder.steady(weight),
    )  # fmt: skip
    return packed


def bias_gradient(builder: Builder, dy: Value) -> Value:
    """Return db [C] for dy [N][C][H][W]."""
    if builder.device.family in BY_PATCHES:
        return reduce(builder, builder.pool.load(dy), [0, 2, 3], SUM)
    images, channels, height, width = dy.shape
    db = builder.new((channels,), "float32")
    builder.launch(
        _kernel("bias_gradient", "bias_gradient"), (channels,),
        {"dy": dy, "db": db, "images": images, "channels": channels, "pixels": height * width},
    )  # fmt: skip
    return db


def _kernel(file: str, name: str, *macros: str) -> Kernel:
    return Kernel.of_files(name, ("cpu/common.cl", f"cpu/{file}.cl"), *macros)


def _images(builder: Builder, node: fx.Node) -> Value:
    """Return a tensor argument as [N][C][H][W]."""
    value = builder.value(node)
    if len(value.shape) == 3:
        value = builder.reshape(value, (*value.shape[:2], 1, value.shape[2]))
    return value


@lowers("aten.convolution.default", supports=why_not, kept=True)
def convolution(builder: Builder, node: fx.Node) -> None:
    """Result: y. A transposed convolution is the input gradient of the plain convolution."""
    x_node, weight_node, bias_node, *_ = arguments(node)
    g, transposed = geometry_of(node)
    x, weight = _images(builder, x_node), _images(builder, weight_node)
    bias = None if bias_node is None else builder.value(bias_node)
    compute = input_gradient if transposed else forward
    y = compute(builder, g, x, weight, bias)
    builder.result(node, builder.reshape(y, node.meta["val"].shape))


@lowers("aten.convolution_backward.default", supports=why_not, kept=True)
def convolution_backward(builder: Builder, node: fx.Node) -> None:
    """Results: (dx, dw, db), each only if `output_mask` requests it."""
    dy_node, x_node, weight_node = arguments(node)[:3]
    want_x, want_weight, want_bias = arguments(node)[10]
    g, transposed = geometry_of(node)
    dy, x, weight = (_images(builder, each) for each in (dy_node, x_node, weight_node))
    wide, narrow = (dy, x) if transposed else (x, dy)  # operand and result of the plain convolution
    dx = dw = None
    if want_x:
        backward = forward if transposed else input_gradient
        dx = backward(builder, g, dy, weight, None)
        dx = builder.reshape(dx, x_node.meta["val"].shape)
    if want_weight:
        dw = weight_gradient(builder, g, wide, narrow)
        dw = builder.reshape(dw, weight_node.meta["val"].shape)
    db = bias_gradient(builder, dy) if want_bias else None
    builder.result(node, (dx, dw, db))
