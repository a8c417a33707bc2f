"""Reads at computed places, and their gradients, which are sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import fx

from hetpipe.sdk.graph import operator_name

from .. import layouts
from ..builder import Builder, Kernel, node_dtype, node_shape
from ..cnames import C_TYPES
from ..expr import Const, Expr, Layout, Load, Value
from ._common import argument, cast
from .registry import lowers

Index = tuple[Expr, int, int]


def _read(
    builder: Builder, node: fx.Node, table: Value, strides: list[int], indices: list[Index]
) -> None:
    shape = node_shape(node)
    layout = Layout(shape, tuple(strides))
    fields = (table.dtype, table, layout, tuple(indices))
    builder.define(node, builder.pool.make(Load, shape, *fields))


def _index(builder: Builder, arg: object, shape: tuple[int, ...], at: int) -> Expr:
    """An index tensor whose dimensions are those of `shape` from `at` on, spread over `shape`."""
    expr = builder.expr(arg)
    padded = expr.shape + (1,) * (len(shape) - at - len(expr.shape))
    expr = builder.view(expr, lambda layout: layouts.reshape(layout, padded))
    return builder.expand(expr, shape)


@lowers("aten.embedding.default")
def embedding(builder: Builder, node: fx.Node) -> None:
    weight: Any = node.args[0]
    rows, width = node_shape(weight)
    shape = node_shape(node)
    index = _index(builder, node.args[1], shape, 0)
    strides = [0] * (len(shape) - 1) + [1]
    _read(builder, node, builder.value(weight), strides, [(index, width, rows)])


@lowers("aten.index_select.default")
def index_select(builder: Builder, node: fx.Node) -> None:
    source: Any = node.args[0]
    table, shape = node_shape(source), node_shape(node)
    if not table:  # its one element is dimension 0
        builder.define(node, builder.expr(source))
        return
    dim: Any = node.args[1]
    dim %= len(table)
    index = _index(builder, node.args[2], shape, dim)
    strides = list(_strides(table))
    step, strides[dim] = strides[dim], 0
    _read(builder, node, builder.value(source), strides, [(index, step, table[dim])])


@lowers("aten.gather.default")
def gather(builder: Builder, node: fx.Node) -> None:
    source: Any = node.args[0]
    table = node_shape(source) or (1,)  # a 0-d tensor or index has one row
    dim: Any = node.args[1]
    dim %= len(table)
    strides = list(_strides(table))
    step, strides[dim] = strides[dim], 0
    rank = len(node_shape(node))  # another than the table's for one element, or an empty index
    strides = [*strides, *[0] * rank][:rank]
    index = builder.expr(node.args[2])
    _read(builder, node, builder.value(source), strides, [(index, step, table[dim])])


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _together(node: fx.Node) -> str | None:
    """Why an `index` cannot be lowered: only one run of index tensors, none of them bool."""
    indices: Any = node.args[1]
    indexed = [d for d, index in enumerate(indices) if index is not None]
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        return "index tensors with a whole dimension between them"
    if any(node_dtype(indices[d]) == "bool" for d in indexed):
        return "bool masks as indices: the result's shape would depend on data"
    return None


@lowers("aten.index.Tensor", "aten._unsafe_index.Tensor", supports=_together)
def index(builder: Builder, node: fx.Node) -> None:
    source: Any = node.args[0]
    shape = node_shape(node)
    first, rank, indices = _indices(builder, node, node_shape(source), shape)
    table = _strides(node_shape(source))
    strides = [*table[:first], *[0] * rank, *table[first + len(indices) :]]
    _read(builder, node, builder.value(source), strides, indices)


def _indices(
    builder: Builder, node: fx.Node, table: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, int, list[Index]]:
    """First indexed dimension, rank of the index tensors together, and the indices."""
    args: Any = node.args[1]
    indexed = [d for d, arg in enumerate(args) if arg is not None]
    rank = max(len(node_shape(args[d])) for d in indexed)
    strides, indices = _strides(table), []
    for d in indexed:
        at = indexed[0] + rank - len(node_shape(args[d]))
        indices.append((_index(builder, args[d], shape, at), strides[d], table[d]))
    return indexed[0], rank, indices


def _unscaled(node: fx.Node) -> str | None:
    scaled = argument(node, 4, "scale_grad_by_freq", False)
    return "scale_grad_by_freq=True has no kernel" if scaled else None


@lowers("aten.embedding_dense_backward.default", supports=_unscaled, kept=True)
def embedding_backward(builder: Builder, node: fx.Node) -> None:
    """Sums the gradients of each row in the order of the samples: the same on every run."""
    arguments: Any = node.args
    gradient, indices, rows, padding = arguments[:4]
    width = node_shape(gradient)[-1]
    index = builder.store(cast(builder, builder.expr(indices), "int64"))
    zero = builder.pool.make(Const, node_shape(node), node_dtype(node), 0.0)
    out = builder.store_copy(zero)
    count = math.prod(node_shape(indices))
    skip = padding if isinstance(padding, int) else -1
    args = {
        "rows": builder.value(gradient), "index": index, "out": out, "count": count,
        "width": width, "table": rows, "skip": skip,
    }  # fmt: skip
    _accumulate(builder, node_dtype(node), args)
    builder.result(node, out)


def _accumulate(builder: Builder, dtype: str, args: dict[str, Any]) -> None:
    lanes = 1 if builder.device.kind == "gpu" else 16
    kernel = Kernel(
        builder.source("scatter.cl"), "add_rows", (f"-DTYPE={C_TYPES[dtype]}", f"-DLANES={lanes}")
    )
    builder.launch(kernel, (-(-args["width"] // lanes),), None, args)


def _accumulates(node: fx.Node) -> str | None:
    if operator_name(node) == "aten.index_put.default" and not argument(node, 3, "accumulate"):
        return "index_put that overwrites; only accumulate=True has a kernel"
    indices: Any = node.args[1]
    if indices[0] is None:
        return "index_put with a whole dimension before an index"
    return _together(node)


@lowers("aten.index_put.default", "aten._unsafe_index_put.default", supports=_accumulates)
def index_put(builder: Builder, node: fx.Node) -> None:
    """The gradient of `index`: adds rows; rows of equal index in the order of the samples."""
    indices: Any = node.args[1]
    shape, dtype = node_shape(node), node_dtype(node)
    spread = _broadcast_shape([node_shape(index) for index in indices])
    strides, row = _strides(shape), None
    for d, index in enumerate(indices):
        at = cast(builder, builder.expr(index, spread), "int64")
        scale = builder.pool.make(Const, spread, "int64", strides[d] // strides[len(indices) - 1])
        size = builder.pool.make(Const, spread, "int64", shape[d])
        code = "({0} + select(({T})(0), {2}, convert_{M}({0} < ({T})(0)))) * {1}"
        term = builder.apply(code, "int64", at, scale, size, weight=3)
        row = term if row is None else builder.apply("{0} + {1}", "int64", row, term)
    assert row is not None
    width = strides[len(indices) - 1]
    values = builder.expr(node.args[2], spread + shape[len(indices) :])
    out = builder.store_copy(builder.expr(node.args[0]))
    count, rows = math.prod(spread), math.prod(shape[: len(indices)])
    args = {
        "rows": builder.store(cast(builder, values, dtype)), "index": builder.store(row),
        "out": out, "count": count, "width": width, "table": rows, "skip": -1,
    }  # fmt: skip
    _accumulate(builder, dtype, args)
    builder.result(node, out)


def _broadcast_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(np.broadcast_shapes(*shapes))
