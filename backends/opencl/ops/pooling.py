"""Maximum, average and adaptive average pooling over two dimensions, with their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.launch import Kernel
from ..lower.registry import lowers
from ._common import arguments, why_not_float32

WINDOW = (
    "kernel_h", "kernel_w", "stride_h", "stride_w", "pad_h", "pad_w", "include_pad", "divisor",
)  # fmt: skip
ADAPTIVE = dict.fromkeys(WINDOW, 0)
"""Window arguments that select bins that cover the image; see `window` in the kernels."""


def _kernel(builder: Builder, name: str) -> Kernel:
    return Kernel(builder.source("cpu/common.cl") + builder.source("cpu/pooling.cl"), name)


def _pair(value: Any, default: tuple[int, int]) -> tuple[int, int]:
    """Return a pair from torch's argument: a number, a list of one or two, or `[]` (default)."""
    items = list(value) if isinstance(value, Sequence) else [value]
    if not items:
        return default
    return (items[0], items[-1])


def _planes(shape: Sequence[int]) -> int:
    return math.prod(shape[:-2])


def _argument(args: Sequence[Any], index: int, default: Any) -> Any:
    return args[index] if len(args) > index else default


@lowers("aten.max_pool2d_with_indices.default", supports=why_not_float32, kept=True)
def max_pool(builder: Builder, node: fx.Node) -> None:
    """Results: (y, indices). Indices count the pixels of a plane."""
    args = arguments(node)
    x = builder.value(args[0])
    kernel = _pair(args[1], (1, 1))
    stride = _pair(_argument(args, 2, []), kernel)
    padding = _pair(_argument(args, 3, 0), (0, 0))
    dilation = _pair(_argument(args, 4, 1), (1, 1))
    shape = tuple(node.meta["val"][0].shape)
    y, index = builder.new(shape, "float32"), builder.new(shape, "int64")
    builder.launch(
        _kernel(builder, "max_pool"), (_planes(shape),), (1,),
        {
            "x": x, "y": y, "index": index, **_sizes(x.shape, shape),
            "kernel_h": kernel[0], "kernel_w": kernel[1], "stride_h": stride[0],
            "stride_w": stride[1], "pad_h": padding[0], "pad_w": padding[1],
            "dilation_h": dilation[0], "dilation_w": dilation[1],
        },
    )  # fmt: skip
    builder.result(node, (y, index))


@lowers("aten.max_pool2d_with_indices_backward.default", supports=why_not_float32, kept=True)
def max_pool_backward(builder: Builder, node: fx.Node) -> None:
    """Result: dx. Each dy is added where the forward found its maximum."""
    dy, index = builder.value(arguments(node)[0]), builder.value(arguments(node)[7])
    dx = builder.new(node.meta["val"].shape, "float32")
    pixels, out_pixels = math.prod(dx.shape[-2:]), math.prod(dy.shape[-2:])
    builder.launch(
        _kernel(builder, "max_pool_backward"), (_planes(dx.shape),), (1,),
        {"dy": dy, "index": index, "dx": dx, "pixels": pixels, "out_pixels": out_pixels},
    )  # fmt: skip
    builder.result(node, dx)


def _sizes(image: Sequence[int], out: Sequence[int]) -> dict[str, int]:
    """Return the rows and columns of an image, and of its pooled result."""
    names = ("height", "width", "out_h", "out_w")
    return dict(zip(names, (*image[-2:], *out[-2:]), strict=True))


def _windows(args: Sequence[Any], first: int) -> dict[str, int]:
    """Return kernel, stride, padding, count_include_pad and divisor of an average pooling."""
    kernel = _pair(args[first], (1, 1))
    stride = _pair(_argument(args, first + 1, []), kernel)
    padding = _pair(_argument(args, first + 2, 0), (0, 0))
    include, divisor = _argument(args, first + 4, True), _argument(args, first + 5, None)
    numbers = (*kernel, *stride, *padding, int(include), divisor or 0)
    return dict(zip(WINDOW, numbers, strict=True))


def _mean(builder: Builder, node: fx.Node, windows: dict[str, int]) -> None:
    x, shape = builder.value(arguments(node)[0]), tuple(node.meta["val"].shape)
    y = builder.new(shape, "float32")
    builder.launch(
        _kernel(builder, "mean_pool"), (_planes(shape),), (1,),
        {"x": x, "y": y, **_sizes(x.shape, shape), **windows},
    )  # fmt: skip
    builder.result(node, y)


def _mean_backward(builder: Builder, node: fx.Node, windows: dict[str, int]) -> None:
    dy: Value = builder.value(arguments(node)[0])
    dx = builder.new(node.meta["val"].shape, "float32")
    builder.launch(
        _kernel(builder, "mean_pool_backward"), (_planes(dx.shape),), (1,),
        {"dy": dy, "dx": dx, **_sizes(dx.shape, dy.shape), **windows},
    )  # fmt: skip
    builder.result(node, dx)


@lowers("aten.avg_pool2d.default", supports=why_not_float32, kept=True)
def mean_pool(builder: Builder, node: fx.Node) -> None:
    """Result: y, averages of windows."""
    _mean(builder, node, _windows(arguments(node), 1))


@lowers("aten.avg_pool2d_backward.default", supports=why_not_float32, kept=True)
def mean_pool_backward(builder: Builder, node: fx.Node) -> None:
    """Result: dx. Each dy is shared over its window."""
    _mean_backward(builder, node, _windows(arguments(node), 2))


@lowers("aten._adaptive_avg_pool2d.default", supports=why_not_float32)
def adaptive_pool(builder: Builder, node: fx.Node) -> None:
    """Result: y, averages of bins that cover the image."""
    _mean(builder, node, ADAPTIVE)


@lowers("aten._adaptive_avg_pool2d_backward.default", supports=why_not_float32)
def adaptive_pool_backward(builder: Builder, node: fx.Node) -> None:
    """Result: dx. Each dy is shared over its bin."""
    _mean_backward(builder, node, ADAPTIVE)
