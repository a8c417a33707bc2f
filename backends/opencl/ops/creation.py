"""Operators that make a tensor from nothing: constants, ranges, random masks."""

from __future__ import annotations

import math

from torch import fx

from ..builder import Builder, node_dtype, node_shape
from ..expr import Const, Coord, Expr, Layout
from ._common import FLOATS, cast
from .registry import lowers


def _constant(builder: Builder, node: fx.Node, number: float | int | bool) -> None:
    dtype = node_dtype(node)
    if dtype == "bool":
        number = bool(number)
    elif dtype not in FLOATS:
        number = int(number)
    builder.define(node, builder.pool.make(Const, node_shape(node), dtype, number))


@lowers("aten.full.default", "aten.full_like.default", "aten.new_full.default")
def full(builder: Builder, node: fx.Node) -> None:
    at = 2 if "new_full" in str(node.target) else 1
    _constant(builder, node, node.args[at])  # type: ignore[arg-type] # a number, by its schema


@lowers("aten.scalar_tensor.default")
def scalar_tensor(builder: Builder, node: fx.Node) -> None:
    _constant(builder, node, node.args[0])  # type: ignore[arg-type] # a number, by its schema


@lowers("aten.zeros.default", "aten.zeros_like.default", "aten.new_zeros.default",
        "aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default",
        "aten.empty_strided.default", "aten.empty_permuted.default",
        "aten.new_empty_strided.default")  # fmt: skip
def zeros(builder: Builder, node: fx.Node) -> None:
    _constant(builder, node, 0)


@lowers("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")
def ones(builder: Builder, node: fx.Node) -> None:
    _constant(builder, node, 1)


@lowers("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def arange(builder: Builder, node: fx.Node) -> None:
    numbers = [arg for arg in node.args if isinstance(arg, (int, float))]
    start = numbers[0] if len(numbers) > 1 else 0
    step = numbers[2] if len(numbers) > 2 else 1
    shape, dtype = node_shape(node), node_dtype(node)
    if dtype not in FLOATS:
        layout = Layout(shape, (int(step),), int(start))
        builder.define(node, cast(builder, builder.pool.make(Coord, shape, "int64", layout), dtype))
        return
    index = cast(builder, builder.pool.make(Coord, shape, "int64", Layout(shape, (1,))), dtype)
    first, stride = (builder.pool.make(Const, shape, dtype, float(n)) for n in (start, step))
    builder.define(node, builder.apply("{1} + {0} * {2}", dtype, index, first, stride))


@lowers("hetpipe.keep_mask.default")
def keep_mask(builder: Builder, node: fx.Node) -> None:
    """Philox 4x32-10; counter and key as `hetpipe.sdk.operators` says."""
    keep = node.args[3]
    assert isinstance(keep, (int, float))
    drawn = _draw(builder, node, node.args[4], node.args[5])
    limit = builder.pool.make(Const, drawn.shape, "float32", float(keep))
    less = builder.apply("abs(convert_{M}({0} < {1}))", "bool", drawn, limit)
    builder.define(node, builder.pool.load(builder.store(less)))


@lowers("hetpipe.uniform.default")
def uniform(builder: Builder, node: fx.Node) -> None:
    drawn = _draw(builder, node, node.args[3], node.args[4])
    builder.define(node, builder.pool.load(builder.store(drawn)))


def _draw(builder: Builder, node: fx.Node, batch_dim: object, samples: object) -> Expr:
    """Uniform floats in [0, 1) of the node's shape."""
    assert isinstance(batch_dim, int)
    assert isinstance(samples, int)
    rng, site, shape = node.args[0], node.args[1], node_shape(node)
    assert isinstance(site, int)
    batch_dim %= len(shape)
    order = [batch_dim, *(d for d in range(len(shape)) if d != batch_dim)]
    moved = Layout.row_major(tuple(shape[d] for d in order))
    strides = [0] * len(shape)
    for d, stride in zip(order, moved.strides, strict=True):
        strides[d] = stride
    flat = builder.pool.make(Coord, shape, "int64", Layout(shape, tuple(strides)))
    elements = max(1, math.prod(shape) // max(1, samples))
    words = builder.expr(rng)
    seed, step, first = (
        builder.view(words, lambda layout, k=k: Layout(  # type: ignore[misc] # mypy: lambda default
            shape, (0,) * len(shape), layout.offset + k * layout.strides[0]))
        for k in range(3)
    )  # fmt: skip
    code = f"philox_uniform({{0}}, {elements}L, {site & 0xFFFFFFFF}u, {{1}}, {{2}}, {{3}})"
    return builder.apply(code, "float32", flat, seed, step, first, weight=64)
