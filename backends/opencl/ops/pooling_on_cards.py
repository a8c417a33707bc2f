"""Pooling on graphics cards: a work-item computes one element of a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from ..gpu.groups import launch_elements
from ..lower.builder import Builder, node_shape
from ..lower.expr import Value
from ..lower.launch import Kernel
from ..lower.registry import lowers_on_cards
from ..lower.signature import Argument
from ._common import argument, arguments
from .pooling import WINDOW, mean_windows, pair, sizes_of, window_of


def _launch(builder: Builder, name: str, result: Value, args: Mapping[str, Argument]) -> None:
    kernel = Kernel.of_files(name, ("gpu/pooling.cl",), f"GROUP={builder.device.group}")
    launch_elements(builder, kernel, result.numel, {"count": result.numel, **args})


def _max_windows(
    node: fx.Node, first: int, image: Sequence[int], out: Sequence[int]
) -> dict[str, Argument]:
    """Return the window arguments of a maximum; torch's arguments begin at `first`."""
    windows = dict(zip(WINDOW, window_of(node, first), strict=False))
    dilation = pair(argument(node, first + 3, "dilation", 1), (1, 1))
    across = {"dilation_h": dilation[0], "dilation_w": dilation[1]}
    return {**sizes_of(image, out), **windows, **across}


@lowers_on_cards("aten.max_pool2d_with_indices.default")
def max_pool(builder: Builder, node: fx.Node) -> None:
    """Results: (y, indices). Indices count the pixels of a plane."""
    x = builder.value(arguments(node)[0])
    shape = tuple(node.meta["val"][0].shape)
    y, index = builder.new(shape, "float32"), builder.new(shape, "int64")
    args = {"x": x, "y": y, "index": index, **_max_windows(node, 1, x.shape, shape)}
    _launch(builder, "max_pool", y, args)
    builder.result(node, (y, index))


@lowers_on_cards("aten.max_pool2d_with_indices_backward.default")
def max_pool_backward(builder: Builder, node: fx.Node) -> None:
    """Result: dx. An element adds each dy whose maximum the forward found there."""
    dy, index = builder.value(arguments(node)[0]), builder.value(arguments(node)[7])
    dx = builder.new(node_shape(node), "float32")
    args = {"dy": dy, "index": index, "dx": dx, **_max_windows(node, 2, dx.shape, dy.shape)}
    _launch(builder, "max_pool_backward", dx, args)
    builder.result(node, dx)


@lowers_on_cards("aten.avg_pool2d.default", "aten._adaptive_avg_pool2d.default")
def mean_pool(builder: Builder, node: fx.Node) -> None:
    """Result: y, averages of windows, or of bins that cover the image."""
    x = builder.value(arguments(node)[0])
    y = builder.new(node_shape(node), "float32")
    args: dict[str, Argument] = {"x": x, "y": y, **sizes_of(x.shape, y.shape)}
    args |= mean_windows(node, 1)
    _launch(builder, "mean_pool", y, args)
    builder.result(node, y)


@lowers_on_cards("aten.avg_pool2d_backward.default", "aten._adaptive_avg_pool2d_backward.default")
def mean_pool_backward(builder: Builder, node: fx.Node) -> None:
    """Result: dx. An element adds its share of each window or bin that contains it."""
    dy = builder.value(arguments(node)[0])
    dx = builder.new(node_shape(node), "float32")
    args: dict[str, Argument] = {"dy": dy, "dx": dx, **sizes_of(dx.shape, dy.shape)}
    args |= mean_windows(node, 2)
    _launch(builder, "mean_pool_backward", dx, args)
    builder.result(node, dx)
