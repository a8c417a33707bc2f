"""Softmax, log-softmax and the negative log likelihood, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from ..fpga import dataflow as fpga
from ..lower.builder import Builder, node_shape
from ..lower.expr import Value
from ..lower.launch import Kernel
from ..lower.registry import lowers
from ..lower.signature import Argument
from ._common import arguments, optional, why_not_float32

LANES = 16
MOST_CLASSES = 4096
"""Most classes of a row that is written past the caches, see `kernels/cpu/loss.cl`."""
NONE, MEAN, SUM = range(3)
"""torch's numbers for reductions."""
FILES = ("cpu/common.cl", "exp.cl", "store.cl", "cpu/loss.cl")


def split_at(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """Return (outer, classes, inner) around dimension `dim`; a scalar is one class."""
    if not shape:
        return 1, 1, 1
    dim %= len(shape)
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def _over_classes(
    builder: Builder,
    name: str,
    tensors: dict[str, Value],
    dim: int,
    logarithm: bool,
    inplace: Sequence[Value] = (),
) -> None:
    """Launch the kernel for rows, or for columns if classes are not neighbours in memory."""
    outer, classes, inner = split_at(tensors["y"].shape, dim)
    args: dict[str, Argument] = {**tensors, "classes": classes, "logarithm": int(logarithm)}
    if inner == 1:
        builder.launch(Kernel.of_files(f"{name}_rows", FILES), (outer,), args, inplace=inplace)
    else:
        kernel, size = Kernel.of_files(f"{name}_columns", FILES), (math.ceil(inner / LANES), outer)
        builder.launch(kernel, size, {**args, "inner": inner}, inplace=inplace)


@lowers("aten._softmax.default", "aten._log_softmax.default", supports=why_not_float32, kept=True)
def softmax(builder: Builder, node: fx.Node) -> None:
    """Result: the softmax over one dimension, or its logarithm."""
    x_node, dim, _ = arguments(node)
    logarithm = "log" in str(node.target)
    outer, classes, inner = split_at(node_shape(node), dim)
    if builder.device.family == "fpga" and inner == 1:
        joined = fpga.softmax(builder, builder.expr(x_node), logarithm)
        if joined is not None:
            builder.result(node, joined)
            return
    x = builder.value(x_node)
    y = builder.new(x.shape, "float32")
    builder.result(node, y)
    if inner > 1:
        _over_classes(builder, "softmax", {"x": x, "y": y}, dim, logarithm)
        return
    each, macros = builder.device.rows_each(outer), builder.device.past_caches(y, classes)
    if logarithm or classes > MOST_CLASSES:
        macros = ()
    builder.launch(
        Kernel.of_files("softmax_rows", FILES, *macros), (math.ceil(outer / each),),
        {
            "x": x, "y": y, "outer": outer, "each": each, "classes": classes,
            "logarithm": int(logarithm),
        },
    )  # fmt: skip


@lowers(
    "aten._softmax_backward_data.default",
    "aten._log_softmax_backward_data.default",
    supports=why_not_float32,
    kept=True,
)
def softmax_backward(builder: Builder, node: fx.Node) -> None:
    """Result: dx, from dy and the forward's result."""
    dy_node, y_node, dim, _ = arguments(node)
    dy, y = builder.value(dy_node), builder.value(y_node)
    dx = builder.new(y.shape, "float32")
    tensors, logarithm = {"dy": dy, "y": y, "dx": dx}, "log" in str(node.target)
    _over_classes(builder, "softmax_backward", tensors, dim, logarithm, (dy, y))
    builder.result(node, dx)


@lowers(
    "aten.nll_loss_forward.default",
    "aten.nll_loss2d_forward.default",
    supports=why_not_float32,
    kept=True,
)
def nll_loss(builder: Builder, node: fx.Node) -> None:
    """Results: (loss, total weight)."""
    x_node, target, weight, reduction, ignore = arguments(node)
    x = builder.value(x_node)
    loss, total = (builder.new(val.shape, "float32") for val in node.meta["val"])
    outer, classes, inner = split_at(x.shape, len(x.shape[:2]) - 1)  # [C] or [N][C][...]
    if len(x.shape) == 1 and reduction == NONE:
        reduction = SUM  # torch then also returns the weight of the only sample
    builder.launch(
        Kernel.of_files("nll_forward", FILES), (1,),
        {
            "x": x, "target": builder.value(target), **optional(builder, "weight", weight, x),
            "loss": loss, "total_weight": total, "outer": outer, "classes": classes,
            "inner": inner, "reduction": reduction, "ignore": ignore,
        },
    )  # fmt: skip
    builder.result(node, (loss, total))


@lowers(
    "aten.nll_loss_backward.default",
    "aten.nll_loss2d_backward.default",
    supports=why_not_float32,
    kept=True,
)
def nll_loss_backward(builder: Builder, node: fx.Node) -> None:
    """Result: the gradient of the scores."""
    dloss, x_node, target, weight, reduction, ignore, total = arguments(node)
    shape = tuple(x_node.meta["val"].shape)
    dx = builder.new(shape, "float32")
    outer, classes, inner = split_at(shape, len(shape[:2]) - 1)
    builder.launch(
        Kernel.of_files("nll_backward", FILES), (outer,),
        {
            "dloss": builder.value(dloss), "target": builder.value(target),
            **optional(builder, "weight", weight, dx), "total_weight": builder.value(total),
            "dx": dx, "classes": classes, "inner": inner, "reduction": reduction,
            "ignore": ignore,
        },
    )  # fmt: skip
    builder.result(node, dx)
