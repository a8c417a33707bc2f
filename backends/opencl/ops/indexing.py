"""Reads at the places given by index tensors: embedding, index_select, gather and index."""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from ..lower.builder import Builder, node_dtype, node_shape
from ..lower.expr import Expr, Layout, Load, Value
from ..lower.registry import lowers

Index = tuple[Expr, int, int]


def _read(
    builder: Builder, node: fx.Node, table: Value, strides: list[int], indices: list[Index]
) -> None:
    shape = node_shape(node)
    layout = Layout(shape, tuple(strides))
    fields = (table.dtype, table, layout, tuple(indices))
    builder.define(node, builder.pool.make(Load, shape, *fields))


def _index(builder: Builder, arg: object, shape: tuple[int, ...], at: int) -> Expr:
    """Return an index tensor expanded to `shape`; its first dimension is dimension `at` there."""
    expr = builder.expr(arg)
    padded = expr.shape + (1,) * (len(shape) - at - len(expr.shape))
    expr = builder.view(expr, lambda layout: layout.reshape(padded))
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
    if not table:  # a 0-d tensor has only one element to select
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
    rank = len(node_shape(node))  # may differ from the table's: one element, or an empty index
    strides = [*strides, *[0] * rank][:rank]
    index = builder.expr(node.args[2])
    _read(builder, node, builder.value(source), strides, [(index, step, table[dim])])


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _together(node: fx.Node) -> str | None:
    """Return why an `index` cannot be lowered: it needs one run of index tensors, none bool."""
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
    """Return the first indexed dimension, the broadcast index tensors' rank, and the indices."""
    args: Any = node.args[1]
    indexed = [d for d, arg in enumerate(args) if arg is not None]
    rank = max(len(node_shape(args[d])) for d in indexed)
    strides, indices = _strides(table), []
    for d in indexed:
        at = indexed[0] + rank - len(node_shape(args[d]))
        indices.append((_index(builder, args[d], shape, at), strides[d], table[d]))
    return indexed[0], rank, indices
