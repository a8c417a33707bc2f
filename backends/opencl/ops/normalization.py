"""Batch and layer normalisation, forward and backward."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ..fpga import dataflow as fpga
from ..lower.builder import Builder
from ..lower.expr import Expr, Value
from ..lower.launch import Kernel
from ..lower.registry import lowers
from ._common import arguments, optional, why_not_float32

LANES = 16
GRADIENTS = ("dx", "dweight", "dbias")


def _kernel(name: str, *macros: str) -> Kernel:
    return Kernel.of_files(name, ("cpu/common.cl", "cpu/normalization.cl"), *macros)


def _channels(x: Value) -> tuple[int, int, int]:
    """Return (N, C, pixels) of a tensor [N][C][...]."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _train(
    builder: Builder, given: Expr, weight: Any, bias: Any, running: Any, momentum: float, eps: float
) -> tuple[Value, Value, Value, Value | None, Value | None]:
    """Return (y, mean, rstd, new mean, new variance); `running` is a pair of nodes or None."""
    old: list[Value | None] = [None, None]
    new: list[Value | None] = [None, None]
    if running is not None:
        old = [builder.value(node) for node in running]
    if builder.device.family == "fpga":
        affine = [None if each is None else builder.value(each) for each in (weight, bias)]
        joined = fpga.batch_norm(builder, given, affine, old, momentum, eps)
        if joined is not None:
            return joined
    x = builder.store(given)
    images, channels, pixels = _channels(x)
    y, mean, rstd = (builder.new(s, "float32") for s in (x.shape, (channels,), (channels,)))
    if running is not None:
        new = [builder.new((channels,), "float32") for _ in running]
    builder.launch(
        _kernel("batch_norm_train"), (channels,),
        {
            "x": x, **optional(builder, "weight", weight, x), **optional(builder, "bias", bias, x),
            "running_mean": old[0] or x, "running_var": old[1] or x,
            "has_running": int(running is not None), "y": y, "save_mean": mean,
            "save_rstd": rstd, "new_mean": new[0] or y, "new_var": new[1] or y, "images": images,
            "channels": channels, "pixels": pixels, "momentum": float(momentum),
            "eps": float(eps),
        },
    )  # fmt: skip
    return y, mean, rstd, new[0], new[1]


def _infer(
    builder: Builder, x: Value, weight: Any, bias: Any, mean: Value, var: Value, eps: float
) -> Value:
    images, channels, pixels = _channels(x)
    y = builder.new(x.shape, "float32")
    builder.launch(
        _kernel("batch_norm_infer"), (channels, images),
        {
            "x": x, **optional(builder, "weight", weight, x), **optional(builder, "bias", bias, x),
            "mean": mean, "var": var, "y": y, "channels": channels, "pixels": pixels,
            "eps": float(eps),
        },
    )  # fmt: skip
    return y


@lowers("aten._native_batch_norm_legit_functional.default", supports=why_not_float32, kept=True)
def batch_norm_functional(builder: Builder, node: fx.Node) -> None:
    """Results: (y, mean, rstd, new running mean, new running variance)."""
    x_node, weight, bias, mean, var, training, momentum, eps = arguments(node)
    if training:
        x_expr = builder.expr(x_node)
        builder.result(node, _train(builder, x_expr, weight, bias, (mean, var), momentum, eps))
        return
    x = builder.value(x_node)
    old_mean, old_var = builder.value(mean), builder.value(var)
    y = _infer(builder, x, weight, bias, old_mean, old_var, eps)
    builder.result(node, (y, *_no_statistics(builder), old_mean, old_var))


@lowers("aten._native_batch_norm_legit_no_training.default", supports=why_not_float32, kept=True)
def batch_norm_inference(builder: Builder, node: fx.Node) -> None:
    """Results: y from running statistics, and two empty tensors."""
    x_node, weight, bias, mean, var, _, eps = arguments(node)
    x = builder.value(x_node)
    y = _infer(builder, x, weight, bias, builder.value(mean), builder.value(var), eps)
    builder.result(node, (y, *_no_statistics(builder)))


@lowers("aten._native_batch_norm_legit.no_stats", supports=why_not_float32, kept=True)
def batch_norm_no_stats(builder: Builder, node: fx.Node) -> None:
    """Results: (y, mean, rstd) of the batch, without running statistics."""
    x_node, weight, bias, _, momentum, eps = arguments(node)
    results = _train(builder, builder.expr(x_node), weight, bias, None, momentum, eps)
    builder.result(node, results[:3])


def _no_statistics(builder: Builder) -> tuple[Value, Value]:
    """Return two empty tensors, torch's mean and rstd in inference."""
    return builder.new((0,), "float32"), builder.new((0,), "float32")


@lowers("aten.native_batch_norm_backward.default", supports=why_not_float32, kept=True)
def batch_norm_backward(builder: Builder, node: fx.Node) -> None:
    """Results: (dx, dweight, dbias), each only if `output_mask` requests it."""
    dy_node, x_node, weight, *running, mean, rstd, train, eps, mask = arguments(node)
    dy, x = builder.value(dy_node), builder.value(x_node)
    images, channels, pixels = _channels(x)
    center, spread = (mean, rstd) if train else running
    shapes = (x.shape, (channels,), (channels,))
    shapes_and_masks = zip(shapes, mask, strict=True)
    out = [builder.new(shape, "float32") if want else None for shape, want in shapes_and_masks]
    some = next((each for each in out if each is not None), None)
    if some is not None:
        builder.launch(
            _kernel("batch_norm_backward"), (channels,),
            {
                "dy": dy, "x": x, **optional(builder, "weight", weight, x),
                "center": builder.value(center), "spread": builder.value(spread),
                "train": int(train), "eps": float(eps),
                **{name: each or some for name, each in zip(GRADIENTS, out, strict=True)},
                **{f"want_{name}": int(w) for name, w in zip(GRADIENTS, mask, strict=True)},
                "images": images, "channels": channels, "pixels": pixels,
            },
        )  # fmt: skip
    builder.result(node, tuple(out))


@lowers("aten.native_layer_norm.default", supports=why_not_float32, kept=True)
def layer_norm(builder: Builder, node: fx.Node) -> None:
    """Results: (y, mean, rstd)."""
    x_node, normalized, weight, bias, eps = arguments(node)
    if builder.device.family == "fpga" and len(normalized) == 1:
        affine = [None if each is None else builder.value(each) for each in (weight, bias)]
        joined = fpga.layer_norm(builder, builder.expr(x_node), affine, eps)
        if joined is not None:
            builder.result(node, joined)
            return
    x = builder.value(x_node)
    length = math.prod(normalized)
    rows = math.prod(x.shape) // length
    y, mean, rstd = (builder.new(val.shape, "float32") for val in node.meta["val"])
    each, macros = builder.device.rows_each(rows), builder.device.past_caches(y, length)
    builder.launch(
        _kernel("layer_norm", *macros), (math.ceil(rows / each),),
        {
            "x": x, **optional(builder, "weight", weight, x), **optional(builder, "bias", bias, x),
            "y": y, "save_mean": mean, "save_rstd": rstd, "rows": rows, "each": each,
            "length": length, "eps": float(eps),
        },
    )  # fmt: skip
    builder.result(node, (y, mean, rstd))


@lowers("aten.native_layer_norm_backward.default", supports=why_not_float32, kept=True)
def layer_norm_backward(builder: Builder, node: fx.Node) -> None:
    """Results: (dx, dweight, dbias), each only if `output_mask` requests it."""
    dy_node, x_node, normalized, mean_node, rstd_node, weight, _, mask = arguments(node)
    dy, x, mean, rstd = (builder.value(n) for n in (dy_node, x_node, mean_node, rstd_node))
    length = math.prod(normalized)
    rows = math.prod(x.shape) // length
    shapes = (x.shape, tuple(normalized), tuple(normalized))
    dx, dweight, dbias = (
        builder.new(s, "float32") if want else None for s, want in zip(shapes, mask, strict=True)
    )
    if dx is not None:
        builder.launch(
            _kernel("layer_norm_dx"), (rows,),
            {
                "dy": dy, "x": x, "mean": mean, "rstd": rstd,
                **optional(builder, "weight", weight, x), "dx": dx, "length": length,
            },
        )  # fmt: skip
    params = dweight or dbias
    if params is not None:
        builder.launch(
            _kernel("layer_norm_dparams"), (math.ceil(length / LANES),),
            {
                "dy": dy, "x": x, "mean": mean, "rstd": rstd, "dweight": dweight or params,
                "dbias": dbias or params, "want_dweight": int(mask[1]),
                "want_dbias": int(mask[2]), "rows": rows, "length": length,
            },
        )  # fmt: skip
    builder.result(node, (dx, dweight, dbias))
