"""Sums, means, extremes and variances over any dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from hetpipe.sdk.graph import operator_name

from ..lower.builder import Builder, node_dtype, node_shape
from ..lower.expr import Const, Coord, Expr, Layout
from ..lower.reduce import reduce
from ..lower.reductions import ALL, ANY, MAXIMUM, MINIMUM, PRODUCT, SUM, Reduction
from ..lower.registry import lowers
from ._common import argument, cast, choose, reshaped


def _dims(dims: Any, rank: int) -> list[int]:
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(rank))
    listed = [dims] if isinstance(dims, int) else dims
    return sorted({int(d) % max(rank, 1) for d in listed} & set(range(rank)))


def reduced(builder: Builder, expr: Expr, dims: Sequence[int], how: Reduction) -> Expr:
    """Reduce `expr`, keeping the reduced dimensions with size 1."""
    value = reduce(builder, expr, dims, how)
    shape = tuple(1 if d in dims else n for d, n in enumerate(expr.shape))
    return builder.pool.load(builder.reshape(value, shape))


def _scaled(builder: Builder, expr: Expr, divisor: float) -> Expr:
    number = builder.pool.make(Const, expr.shape, expr.dtype, float(divisor))
    return builder.apply("{0} / {1}", expr.dtype, expr, number, weight=1)


@lowers("aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim",
        "aten.prod.default", "aten.prod.dim_int")  # fmt: skip
def total(builder: Builder, node: fx.Node) -> None:
    expr = cast(builder, builder.expr(node.args[0]), node_dtype(node))
    whole = operator_name(node).endswith(".default")
    dims = _dims(None if whole else node.args[1], len(expr.shape))
    how = PRODUCT if "prod" in operator_name(node) else SUM
    result = reduced(builder, expr, dims, how)
    if "mean" in operator_name(node):
        result = _scaled(builder, result, math.prod(expr.shape[d] for d in dims))
    builder.define(node, reshaped(builder, result, node_shape(node)))


@lowers("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default",
        "aten.any.default", "aten.any.dim", "aten.any.dims", "aten.all.default",
        "aten.all.dim")  # fmt: skip
def extreme(builder: Builder, node: fx.Node) -> None:
    name = operator_name(node).split(".")[1]
    how = {"amax": MAXIMUM, "max": MAXIMUM, "amin": MINIMUM, "min": MINIMUM}.get(name)
    how = how or (ANY if name == "any" else ALL)
    # For uint8, torch's `any` and `all` compare elements with 0, and return 0 or 1 as uint8.
    dtype = "bool" if how in (ANY, ALL) else node_dtype(node)
    expr = cast(builder, builder.expr(node.args[0]), dtype)
    dims = _dims(argument(node, 1, "dim"), len(expr.shape))
    result = cast(builder, reduced(builder, expr, dims, how), node_dtype(node))
    builder.define(node, reshaped(builder, result, node_shape(node)))


def moments(
    builder: Builder, expr: Expr, dims: Sequence[int], correction: float
) -> tuple[Expr, Expr]:
    """Return variance and mean, in two passes: sums of squared differences lose no digits."""
    count = math.prod(expr.shape[d] for d in dims)
    mean = _scaled(builder, reduced(builder, expr, dims, SUM), count)
    mean = builder.pool.load(builder.store(mean))
    wide = builder.expand(mean, expr.shape)
    square = builder.apply("({0} - {1}) * ({0} - {1})", expr.dtype, expr, wide, weight=2)
    variance = reduced(builder, square, dims, SUM)
    return _scaled(builder, variance, max(0.0, count - correction)), mean


@lowers("aten.var.correction", "aten.var_mean.correction")
def variance(builder: Builder, node: fx.Node) -> None:
    source: Any = node.args[0]
    expr = builder.pool.load(builder.store(builder.expr(source)))
    dims = _dims(argument(node, 1, "dim"), len(expr.shape))
    given: Any = node.kwargs.get("correction", 1)
    var, mean = moments(builder, expr, dims, 1.0 if given is None else float(given))
    if operator_name(node) == "aten.var.correction":
        builder.define(node, reshaped(builder, var, node_shape(node)))
        return
    shape = tuple(int(n) for n in node.meta["val"][0].shape)
    parts = (reshaped(builder, var, shape), reshaped(builder, mean, shape))
    builder.define_results(node, parts)


@lowers("aten.argmax.default", "aten.argmin.default")
def position(builder: Builder, node: fx.Node) -> None:
    """Result: the first index of the extreme."""
    expr: Expr = builder.pool.load(builder.store(builder.expr(node.args[0])))
    dim = argument(node, 1, "dim")
    if dim is None:
        expr, dim = reshaped(builder, expr, (expr.numel,)), 0
    how = MAXIMUM if "argmax" in operator_name(node) else MINIMUM
    _, place = _extreme_at(builder, expr, int(dim), how)
    builder.define(node, reshaped(builder, place, node_shape(node)))


@lowers("aten.max.dim", "aten.min.dim")
def extreme_along(builder: Builder, node: fx.Node) -> None:
    expr = builder.pool.load(builder.store(builder.expr(node.args[0])))
    how = MAXIMUM if operator_name(node) == "aten.max.dim" else MINIMUM
    dim: Any = node.args[1]
    shape = tuple(int(n) for n in node.meta["val"][0].shape)
    parts = _extreme_at(builder, expr, int(dim), how)
    builder.define_results(node, tuple(reshaped(builder, part, shape) for part in parts))


def _extreme_at(builder: Builder, expr: Expr, dim: int, how: Reduction) -> tuple[Expr, Expr]:
    """Return the extreme along a dimension, and its first index."""
    if not expr.shape:
        return expr, builder.pool.make(Const, (), "int64", 0)
    dim %= len(expr.shape)
    best = reduced(builder, expr, [dim], how)
    wide = builder.expand(best, expr.shape)
    strides = tuple(int(d == dim) for d in range(len(expr.shape)))
    place = builder.pool.make(Coord, expr.shape, "int64", Layout(expr.shape, strides))
    far = builder.pool.make(Const, expr.shape, "int64", expr.shape[dim])
    # NaN counts as the extreme, but is not equal to itself.
    here = builder.apply("abs(convert_{M}(({0} == {1}) | ({0} != {0})))", "bool", expr, wide)
    return best, reduced(builder, choose(builder, here, place, far), [dim], MINIMUM)
