"""Maximum, average and adaptive average pooling over two dimensions, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from ..lower.builder import Builder, node_shape
from ..lower.launch import Kernel
from ..lower.registry import lowers
from ..lower.signature import Argument
from ._common import argument, arguments, why_not_float32

FILES = ("cpu/common.cl", "cpu/pooling.cl")
WINDOW = (
    "kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w", "include_pad", "divisor",
)  # fmt: skip
ADAPTIVE = dict.fromkeys(WINDOW, 0)
"""Window arguments for bins that cover the image; see `window` in `kernels/cpu/pooling.cl`."""


def pair(value: Any, default: tuple[int, int]) -> tuple[int, int]:
    """Return a pair from torch's argument: a number, a list of one or two, or `[]` (default)."""
    items = list(value) if isinstance(value, Sequence) else [value]
    if not items:
        return default
    return (items[0], items[-1])


def _planes(shape: Sequence[int]) -> tuple[int]:
    return (math.prod(shape[:-2]),)


def sizes_of(image: Sequence[int], out: Sequence[int]) -> dict[str, int]:
    """Return the rows and columns of an image, and of its pooled result."""
    names = ("height", "width", "out_h", "out_w")
    return dict(zip(names, (*image[-2:], *out[-2:]), strict=True))


def window_of(node: fx.Node, first: int) -> tuple[int, ...]:
    """Return kernel, stride and padding, each in h and w; the arguments begin at `first`."""
    kernel = pair(arguments(node)[first], (1, 1))
    stride = pair(argument(node, first + 1, "stride", []), kernel)
    return (*kernel, *stride, *pair(argument(node, first + 2, "padding", 0), (0, 0)))


@lowers("aten.max_pool2d_with_indices.default", supports=why_not_float32, kept=True)
def max_pool(builder: Builder, node: fx.Node) -> None:
    """Results: (y, indices). Indices count the pixels of a plane."""
    x = builder.value(arguments(node)[0])
    dilation = pair(argument(node, 4, "dilation", 1), (1, 1))
    shape = tuple(node.meta["val"][0].shape)
    y, index = builder.new(shape, "float32"), builder.new(shape, "int64")
    args: dict[str, Argument] = {
        "x": x, "y": y, "index": index, **sizes_of(x.shape, shape),
        **dict(zip(WINDOW, window_of(node, 1), strict=False)), "dilation_h": dilation[0],
        "dilation_w": dilation[1],
    }  # fmt: skip
    builder.launch(Kernel.of_files("max_pool", FILES), _planes(shape), args)
    builder.result(node, (y, index))


@lowers("aten.max_pool2d_with_indices_backward.default", supports=why_not_float32, kept=True)
def max_pool_backward(builder: Builder, node: fx.Node) -> None:
    """Result: dx. Each dy is added where the forward found its maximum."""
    dy, index = builder.value(arguments(node)[0]), builder.value(arguments(node)[7])
    dx = builder.new(node.meta["val"].shape, "float32")
    pixels, out_pixels = math.prod(dx.shape[-2:]), math.prod(dy.shape[-2:])
    args: dict[str, Argument] = {
        "dy": dy,
        "index": index,
        "dx": dx,
        "pixels": pixels,
        "out_pixels": out_pixels,
    }
    builder.launch(Kernel.of_files("max_pool_backward", FILES), _planes(dx.shape), args)
    builder.result(node, dx)


@lowers("aten.avg_pool2d.default", supports=why_not_float32, kept=True)
@lowers("aten._adaptive_avg_pool2d.default", supports=why_not_float32)
def mean_pool(builder: Builder, node: fx.Node) -> None:
    """Result: y, averages of windows, or of bins that cover the image."""
    x = builder.value(arguments(node)[0])
    y = builder.new(node_shape(node), "float32")
    args: dict[str, Argument] = {
        "x": x,
        "y": y,
        **sizes_of(x.shape, y.shape),
        **mean_windows(node, 1),
    }
    builder.launch(Kernel.of_files("mean_pool", FILES), _planes(y.shape), args)
    builder.result(node, y)


@lowers("aten.avg_pool2d_backward.default", supports=why_not_float32, kept=True)
@lowers("aten._adaptive_avg_pool2d_backward.default", supports=why_not_float32)
def mean_pool_backward(builder: Builder, node: fx.Node) -> None:
    """Result: dx. Each dy is spread over its window or bin."""
    dy = builder.value(arguments(node)[0])
    dx = builder.new(node_shape(node), "float32")
    args: dict[str, Argument] = {
        "dy": dy,
        "dx": dx,
        **sizes_of(dx.shape, dy.shape),
        **mean_windows(node, 2),
    }
    builder.launch(Kernel.of_files("mean_pool_backward", FILES), _planes(dx.shape), args)
    builder.result(node, dx)


def mean_windows(node: fx.Node, first: int) -> dict[str, int]:
    """Return the window arguments of an average; torch's arguments begin at `first`."""
    if "adaptive" in str(node.target):
        return ADAPTIVE
    include = argument(node, first + 4, "count_include_pad", True)
    divisor = argument(node, first + 5, "divisor_override") or 0
    return dict(zip(WINDOW, (*window_of(node, first), int(include), divisor), strict=True))
