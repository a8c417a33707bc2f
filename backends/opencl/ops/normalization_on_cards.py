"""Batch and layer normalisation on graphics cards.

Sums over a channel or a column are generated reductions, since many work-groups must share one sum
to fill the card. The other steps of batch norm are elementwise expressions, which join the kernels
of their neighbours. Rows of layer norm have kernels, which read a row from memory only once.
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ..gpu.groups import launch_rows
from ..lower.builder import CHEAP, Builder
from ..lower.expr import Expr, work
from ..lower.reduce import reduce_together
from ..lower.reductions import SUM
from ..lower.registry import lowers_on_cards
from ._common import arguments, formula, optional, reshaped
from .reduction import moments

BATCH, PIXELS = 0, 2
"""Dimensions of images as (N, C, pixels) over which batch norm takes its sums."""


def _stored(builder: Builder, expr: Expr) -> Expr:
    return builder.pool.load(builder.store(expr))


def _images(builder: Builder, node: Any) -> Expr:
    """Return a tensor [N][C][...] as (N, C, pixels)."""
    expr = builder.expr(node)
    sizes = (*expr.shape[:2], math.prod(expr.shape[2:]))
    expr = expr if work(expr) <= CHEAP else _stored(builder, expr)
    return reshaped(builder, expr, sizes)


def _channels(builder: Builder, node: Any) -> Expr:
    """Return a value per channel as (1, C, 1)."""
    expr = builder.expr(node)
    return reshaped(builder, expr, (1, expr.numel, 1))


def _normalized(builder: Builder, x: Expr, mean: Expr, rstd: Expr, weight: Any, bias: Any) -> Expr:
    """Return y = x * scale + shift, with a scale and a shift per channel."""
    scale = rstd
    if weight is not None:
        scale = _stored(builder, formula(builder, "{0} * {1}", rstd, _channels(builder, weight)))
    shift = formula(builder, "-{0} * {1}", mean, scale)
    if bias is not None:
        shift = formula(builder, "{0} + {1}", shift, _channels(builder, bias))
    return formula(builder, "fma({0}, {1}, {2})", x, scale, _stored(builder, shift), weight=2)


def _reciprocal_root(builder: Builder, variance: Expr, eps: float) -> Expr:
    code = "1.0f / sqrt({0} + {1})"
    return _stored(builder, formula(builder, code, variance, eps, weight=8))


def _train(builder: Builder, node: fx.Node, running: Any, momentum: float, eps: float) -> None:
    x_node, weight, bias = arguments(node)[:3]
    shape = builder.expr(x_node).shape
    x = _stored(builder, _images(builder, x_node))
    count = x.shape[BATCH] * x.shape[PIXELS]
    variance, mean = moments(builder, x, [BATCH, PIXELS], 0.0)
    rstd = _reciprocal_root(builder, variance, eps)
    y = _normalized(builder, x, mean, rstd, weight, bias)
    results = [mean, rstd]
    if running is not None:
        unbiased = formula(builder, "{0} * {1} / {2}", variance, count, count - 1)
        for new, old in zip((mean, unbiased), running, strict=True):
            moved = formula(
                builder, "{0} * {1} + {2} * {3}", new, momentum, _channels(builder, old),
                1.0 - momentum,
            )  # fmt: skip
            results.append(_stored(builder, moved))
    statistics = (reshaped(builder, each, (x.shape[1],)) for each in results)
    builder.define_results(node, (reshaped(builder, y, shape), *statistics))


def _infer(builder: Builder, node: fx.Node, mean: Any, var: Any, eps: float) -> Expr:
    x_node, weight, bias = arguments(node)[:3]
    rstd = _reciprocal_root(builder, _channels(builder, var), eps)
    center = _channels(builder, mean)
    y = _normalized(builder, _images(builder, x_node), center, rstd, weight, bias)
    return reshaped(builder, y, builder.expr(x_node).shape)


@lowers_on_cards("aten._native_batch_norm_legit_functional.default")
def batch_norm_functional(builder: Builder, node: fx.Node) -> None:
    """Results: (y, mean, rstd, new running mean, new running variance)."""
    _, _, _, mean, var, training, momentum, eps = arguments(node)
    if training:
        _train(builder, node, (mean, var), momentum, eps)
        return
    y = _infer(builder, node, mean, var, eps)
    old = builder.expr(mean), builder.expr(var)
    builder.define_results(node, (y, *_no_statistics(builder), *old))


@lowers_on_cards("aten._native_batch_norm_legit_no_training.default")
def batch_norm_inference(builder: Builder, node: fx.Node) -> None:
    """Results: y from running statistics, and two empty tensors."""
    _, _, _, mean, var, _, eps = arguments(node)
    y = _infer(builder, node, mean, var, eps)
    builder.define_results(node, (y, *_no_statistics(builder)))


@lowers_on_cards("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(builder: Builder, node: fx.Node) -> None:
    """Results: (y, mean, rstd) of the batch, without running statistics."""
    *_, momentum, eps = arguments(node)
    _train(builder, node, None, momentum, eps)


def _no_statistics(builder: Builder) -> tuple[Expr, Expr]:
    """Return two empty tensors, torch's mean and rstd in inference."""
    none = builder.pool.load(builder.new((0,), "float32"))
    return none, none


@lowers_on_cards("aten.native_batch_norm_backward.default")
def batch_norm_backward(builder: Builder, node: fx.Node) -> None:
    """Results: (dx, dweight, dbias), each only if `output_mask` requests it."""
    dy_node, x_node, weight, *running, mean, rstd, train, eps, mask = arguments(node)
    dy, x = _images(builder, dy_node), _stored(builder, _images(builder, x_node))
    channels = x.shape[1]
    center, spread = (_channels(builder, each) for each in ((mean, rstd) if train else running))
    scale = spread if train else _reciprocal_root(builder, spread, eps)
    off = formula(builder, "{0} - {1}", x, center)
    want_dx, want_dweight, want_dbias = mask
    dx = dweight = dbias = None
    factor = scale
    if weight is not None:
        factor = formula(builder, "{0} * {1}", scale, _channels(builder, weight))
    if want_dweight or want_dbias or (want_dx and train):
        terms = [dy, formula(builder, "{0} * {1}", dy, off)]
        sums = reduce_together(builder, terms, [BATCH, PIXELS], SUM)
        total, dot = (reshaped(builder, builder.pool.load(s), (1, channels, 1)) for s in sums)
        dweight = formula(builder, "{0} * {1}", dot, scale)
        dbias = total
    if want_dx and train:
        count = x.shape[BATCH] * x.shape[PIXELS]
        level = _stored(builder, formula(builder, "{0} / {1}", total, count))
        code = "{0} * {1} * {1} / {2}"
        slope = _stored(builder, formula(builder, code, dot, scale, count, weight=3))
        code, factor = "({0} - {1} - {2} * {3}) * {4}", _stored(builder, factor)
        dx = formula(builder, code, dy, level, off, slope, factor, weight=4)
    elif want_dx:
        dx = formula(builder, "{0} * {1}", dy, _stored(builder, factor))
    shape = builder.expr(x_node).shape
    found = ((dx, shape), (dweight, (channels,)), (dbias, (channels,)))
    results = (
        reshaped(builder, each, sizes) if want and each is not None else None
        for (each, sizes), want in zip(found, mask, strict=True)
    )
    builder.define_results(node, tuple(results))


@lowers_on_cards("aten.native_layer_norm.default")
def layer_norm(builder: Builder, node: fx.Node) -> None:
    """Results: (y, mean, rstd)."""
    x_node, normalized, weight, bias, eps = arguments(node)
    x, length = builder.value(x_node), math.prod(normalized)
    y, mean, rstd = (builder.new(val.shape, "float32") for val in node.meta["val"])
    args = {
        "x": x, **optional(builder, "weight", weight, x), **optional(builder, "bias", bias, x),
        "y": y, "save_mean": mean, "save_rstd": rstd, "rows": x.numel // length, "length": length,
        "eps": float(eps),
    }  # fmt: skip
    launch_rows(builder, "normalization.cl", "layer_norm", length, args)
    builder.result(node, (y, mean, rstd))


@lowers_on_cards("aten.native_layer_norm_backward.default")
def layer_norm_backward(builder: Builder, node: fx.Node) -> None:
    """Results: (dx, dweight, dbias), each only if `output_mask` requests it."""
    dy_node, x_node, normalized, mean_node, rstd_node, weight, _, mask = arguments(node)
    dy, x, mean, rstd = (builder.value(n) for n in (dy_node, x_node, mean_node, rstd_node))
    length = math.prod(normalized)
    rows = x.numel // length
    results: dict[str, Any] = {}
    if mask[0]:
        results["dx"] = dx = builder.new(x.shape, "float32")
        args = {
            "dy": dy, "x": x, "mean": mean, "rstd": rstd, **optional(builder, "weight", weight, x),
            "dx": dx, "rows": rows, "length": length,
        }  # fmt: skip
        launch_rows(builder, "normalization.cl", "layer_norm_dx", length, args)
    matrix, column = (rows, length), (rows, 1)
    gradient, given, center, scale = (
        reshaped(builder, builder.pool.load(each), sizes)
        for each, sizes in ((dy, matrix), (x, matrix), (mean, column), (rstd, column))
    )
    code = "{0} * (({1} - {2}) * {3})"
    terms = {
        "dweight": formula(builder, code, gradient, given, center, scale, weight=3),
        "dbias": gradient,
    }
    wanted = [name for name, want in zip(terms, mask[1:], strict=True) if want]
    if wanted:
        sums = reduce_together(builder, [terms[name] for name in wanted], [0], SUM)
        results |= {n: builder.reshape(s, normalized) for n, s in zip(wanted, sums, strict=True)}
    builder.result(node, tuple(map(results.get, ("dx", "dweight", "dbias"))))
