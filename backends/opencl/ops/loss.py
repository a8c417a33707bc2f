"""Softmax, log-softmax and the negative log likelihood, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from .. import fpga
from ..lower.builder import Builder, node_shape
from ..lower.expr import Value
from ..lower.launch import Kernel
from ..lower.registry import lowers
from ..lower.rows import past_caches, rows_each
from ..lower.signature import Argument
from ._common import arguments, optional, why_not_float32

LANES = 16
MOST_CLASSES = 4096
"""Most classes of a row that is written past the caches, see `kernels/cpu/loss.cl`."""
NONE, SUM = 0, 2
"""torch's numbers for reductions."""


def _kernel(builder: Builder, name: str, *options: str) -> Kernel:
    files = ("cpu/common.cl", "exp.cl", "store.cl", "cpu/loss.cl")
    return Kernel("".join(map(builder.source, files)), name, options)


def _split(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
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
    outer, classes, inner = _split(tensors["y"].shape, dim)
    args: dict[str, Argument] = {**tensors, "classes": classes, "logarithm": int(logarithm)}
    if inner == 1:
        builder.launch(_kernel(builder, f"{name}_rows"), (outer,), (1,), args, inplace=inplace)
    else:
        kernel, size = _kernel(builder, f"{name}_columns"), (math.ceil(inner / LANES), outer)
        builder.launch(kernel, size, (1, 1), {**args, "inner": inner}, inplace=inplace)


@lowers("aten._softmax.default", "aten._log_softmax.default", supports=why_not_float32, kept=True)
def softmax(builder: Builder, node: fx.Node) -> None:
    """Result: the softmax over one dimension, or its logarithm."""
    x_node, dim, _ = arguments(node)
    if builder.device.family == "fpga" and _split(node_shape(node), dim)[2] == 1:
        joined = fpga.softmax(builder, builder.expr(x_node), "log" in str(node.target))
        if joined is not None:
            builder.result(node, joined)
            return
    x = builder.value(x_node)
    y = builder.new(x.shape, "float32")
    logarithm = "log" in str(node.target)
    outer, classes, inner = _split(y.shape, dim)
    if inner == 1:
        _rows_in_turn(builder, x, y, outer, classes, logarithm)
    else:
        _over_classes(builder, "softmax", {"x": x, "y": y}, dim, logarithm)
    builder.result(node, y)


def _rows_in_turn(
    builder: Builder, x: Value, y: Value, outer: int, classes: int, logarithm: bool
) -> None:
    each, options = rows_each(builder.device, outer), past_caches(builder.device, y, classes)
    if logarithm or classes > MOST_CLASSES:
        options = ()
    builder.launch(
        _kernel(builder, "softmax_rows", *options), (math.ceil(outer / each),), (1,),
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
    dy, y, dim = (
        builder.value(arguments(node)[0]),
        builder.value(arguments(node)[1]),
        arguments(node)[2],
    )
    dx = builder.new(y.shape, "float32")
    tensors, logarithm = {"dy": dy, "y": y, "dx": dx}, "log" in str(node.target)
    _over_classes(builder, "softmax_backward", tensors, dim, logarithm, (dy, y))
    builder.result(node, dx)


def _samples(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (outer, classes, inner) of scores [C], [N][C] or [N][C][...]."""
    return _split(shape, 0 if len(shape) == 1 else 1)


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
    outer, classes, inner = _samples(x.shape)
    if len(x.shape) == 1 and reduction == NONE:
        reduction = SUM  # torch then also returns the weight of the only sample
    builder.launch(
        _kernel(builder, "nll_forward"), (1,), (1,),
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
    outer, classes, inner = _samples(shape)
    builder.launch(
        _kernel(builder, "nll_backward"), (outer,), (1,),
        {
            "dloss": builder.value(dloss), "target": builder.value(target),
            **optional(builder, "weight", weight, dx), "total_weight": builder.value(total),
            "dx": dx, "classes": classes, "inner": inner, "reduction": reduction,
            "ignore": ignore,
        },
    )  # fmt: skip
    builder.result(node, dx)
