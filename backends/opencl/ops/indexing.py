"""Reads and writes at the places given by index tensors, such as gather, index and scatter."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from torch import fx

from hetpipe.sdk.graph import operator_name

from ..gpu import scatter as cards
from ..lower.builder import Builder, node_dtype, node_shape
from ..lower.expr import Const, Coord, Expr, Layout, Load, Value
from ..lower.launch import Kernel
from ..lower.registry import lowers
from ..lower.signature import C_TYPES
from ..lower.target import Target
from ._common import FLOATS, argument, cast

JOINS = {"sum": "ADD", "add": "ADD", "prod": "MULTIPLY", "multiply": "MULTIPLY",
         "amax": "LARGER", "amin": "SMALLER"}  # fmt: skip
"""Macros of `kernels/scatter.cl`, by torch's names of reductions."""
FILES = ("scatter.cl",)
COLUMNS = (256, 64, 16)
"""Choices of columns per work-item of `put_rows`; each needs a separate program."""

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
    strides = _strides(table)
    step, strides[dim] = strides[dim], 0
    _read(builder, node, builder.value(source), strides, [(index, step, table[dim])])


@lowers("aten.gather.default")
def gather(builder: Builder, node: fx.Node) -> None:
    source: Any = node.args[0]
    table = node_shape(source) or (1,)  # a 0-d tensor or index has one row
    dim: Any = node.args[1]
    dim %= len(table)
    strides = _strides(table)
    step, strides[dim] = strides[dim], 0
    rank = len(node_shape(node))  # may differ from the table's for one element or an empty index
    strides = [*strides, *[0] * rank][:rank]
    index = builder.expr(node.args[2])
    _read(builder, node, builder.value(source), strides, [(index, step, table[dim])])


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _together(node: fx.Node) -> str | None:
    """Return why an `index` cannot be lowered, or None if it can."""
    indices: Any = node.args[1]
    indexed = [d for d, index in enumerate(indices) if index is not None]
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        return "there is a dimension without an index between two index tensors"
    return _no_masks(node)


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


def _unscaled(node: fx.Node) -> str | None:
    scaled = argument(node, 4, "scale_grad_by_freq", False)
    return "scale_grad_by_freq=True has no kernel" if scaled else None


@lowers("aten.embedding_dense_backward.default", supports=_unscaled, kept=True)
def embedding_backward(builder: Builder, node: fx.Node) -> None:
    """Sum each row's gradients in the order of the samples, so that all runs give the same sum."""
    arguments: Any = node.args
    gradient, indices, rows, padding = arguments[:4]
    index = builder.store(cast(builder, builder.expr(indices), "int64"))
    zero = builder.pool.make(Const, node_shape(node), node_dtype(node), 0.0)
    out = builder.store_copy(zero)
    args = {
        "rows": builder.value(gradient), "index": index, "out": out,
        "count": math.prod(node_shape(indices)), "width": node_shape(gradient)[-1], "table": rows,
        "skip": padding if isinstance(padding, int) else -1,
    }  # fmt: skip
    _put_rows(builder, node_dtype(node), "ADD", args)
    builder.result(node, out)


def _put_rows(builder: Builder, dtype: str, how: str, args: dict[str, Any]) -> None:
    if builder.device.family == "gpu":
        cards.put_rows(builder, _macros(dtype, how), args)
        return
    lanes = _columns(args["width"], builder.device)
    kernel = Kernel.of_files("put_rows", FILES, *_macros(dtype, how, lanes))
    builder.launch(kernel, (-(-args["width"] // lanes),), args, None)


def _columns(width: int, device: Target) -> int:
    """Return the columns per work-item: the most for which every compute unit has a work-item."""
    fitting = (columns for columns in COLUMNS if -(-width // columns) >= device.compute_units)
    return next(fitting, COLUMNS[-1])


def _macros(dtype: str, how: str, lanes: int = 1) -> tuple[str, ...]:
    if dtype == "bool" and how == "ADD":
        how = "LARGER"
    return (f"TYPE={C_TYPES[dtype]}", f"JOIN={how}", f"LANES={lanes}")


def _no_masks(node: fx.Node) -> str | None:
    indices: Any = node.args[1]
    if any(node_dtype(index) == "bool" for index in indices if index is not None):
        return "bool masks as indices: the number of elements that they choose depends on data"
    return None


@lowers("aten.index_put.default", "aten._unsafe_index_put.default", supports=_no_masks)
def index_put(builder: Builder, node: fx.Node) -> None:
    """Add the values for each place in order; without `accumulate`, keep the last value."""
    indices: Any = node.args[1]
    shape, dtype = node_shape(node), node_dtype(node)
    indexed = [d for d, index in enumerate(indices) if index is not None]
    whole = [d for d in range(len(shape)) if d not in indexed]
    spread = tuple(np.broadcast_shapes(*(node_shape(indices[d]) for d in indexed)))
    # If the indexed dimensions are adjacent, the index tensors' dimensions replace them in the
    # values; otherwise the index tensors' dimensions come first.
    run = indexed == list(range(indexed[0], indexed[-1] + 1))
    before = [d for d in whole if run and d < indexed[0]]
    after = [d for d in whole if d not in before]
    sizes = (*(shape[d] for d in before), *spread, *(shape[d] for d in after))
    first, rank = len(before), len(spread)
    order = [*range(first, first + rank), *range(first), *range(first + rank, len(sizes))]
    values = cast(builder, builder.expr(node.args[2], sizes), dtype)
    moved = builder.view(values, lambda layout: layout.permute(order))

    places = [*indexed, *whole]
    source = builder.expr(node.args[0])
    copy = builder.view(source, lambda layout: layout.permute(places))
    out = builder.store_copy(copy)
    if moved.numel:
        args = {
            "rows": builder.store(moved), "index": builder.store(_row(builder, node, spread)),
            "out": out, "count": math.prod(spread), "width": math.prod(shape[d] for d in whole),
            "table": math.prod(shape[d] for d in indexed), "skip": -1,
        }  # fmt: skip
        _put_rows(builder, dtype, "ADD" if argument(node, 3, "accumulate", False) else "SET", args)
    back = [places.index(d) for d in range(len(shape))]
    stored = builder.pool.load(out)
    builder.define(node, builder.view(stored, lambda layout: layout.permute(back)))


def _row(builder: Builder, node: fx.Node, spread: tuple[int, ...]) -> Expr:
    """Return the row that the index tensors select together, counted over indexed dimensions."""
    indices: Any = node.args[1]
    shape = node_shape(node)
    row: Expr | None = None
    for d, index in enumerate(indices):
        if index is None:
            continue
        at = cast(builder, builder.expr(index, spread), "int64")
        size = builder.pool.make(Const, spread, "int64", shape[d])
        at = builder.apply(
            "{0} + select(({T})(0), {1}, convert_{M}({0} < ({T})(0)))", "int64", at, size, weight=2
        )
        row = at if row is None else builder.apply("{0} * {2} + {1}", "int64", row, at, size)
    assert row is not None
    return row


def _reduction(node: fx.Node) -> str | None:
    """Return torch's name of a node's reduction, or None if the node overwrites."""
    name = operator_name(node)
    if name == "aten.scatter_add.default":
        return "sum"
    if name == "aten.scatter_reduce.two":
        return str(argument(node, 4, "reduce"))
    reduction = node.kwargs.get("reduce")
    return None if reduction is None else str(reduction)


def _known(node: fx.Node) -> str | None:
    reduction = _reduction(node)
    return None if reduction is None or reduction in JOINS else f"reduction {reduction!r}"


@lowers("aten.scatter.src", "aten.scatter.value", "aten.scatter.reduce",
        "aten.scatter.value_reduce", "aten.scatter_add.default", "aten.scatter_reduce.two",
        supports=_known)  # fmt: skip
def scatter(builder: Builder, node: fx.Node) -> None:
    """Reduce the values for each place in order; without a reduction, keep the last value."""
    arguments: Any = node.args
    source, dim, places, values = arguments[:4]
    dtype, reduction = node_dtype(node), _reduction(node)
    shape = _whole(node)
    dim %= len(shape)
    index = _as_lines(builder, places, "int64", dim)
    if isinstance(values, fx.Node):
        lines = _as_lines(builder, values, dtype, dim, _whole(places))
    else:
        lines = builder.expr(values, index.shape, dtype)
    out = builder.store_copy(_with_a_dimension(builder, builder.expr(source)))
    joins = [("SET" if reduction is None else JOINS[reduction], lines)]
    if argument(node, 5, "include_self", True) is False:
        start = _start(joins[0][0], dtype)
        joins.insert(0, ("SET", builder.pool.make(Const, index.shape, dtype, start)))
    if index.numel and builder.device.family == "gpu":
        for how, joined in joins:
            cards.put_lines(builder, _macros(dtype, how), joined, index, out, dim)
    elif index.numel:
        strides = Layout.row_major(shape).strides
        begins = Layout(index.shape[:-1], (*strides[:dim], *strides[dim + 1 :]))
        base = builder.pool.make(Coord, begins.shape, "int32", begins)
        args: dict[str, Any] = {
            "index": builder.store(index), "base": builder.store(base), "out": out,
            "count": index.shape[-1], "step": strides[dim], "size": shape[dim],
        }  # fmt: skip
        for how, joined in joins:
            kernel = Kernel.of_files("put_lines", FILES, *_macros(dtype, how))
            args["lines"] = builder.store(joined)
            builder.launch(kernel, (math.prod(begins.shape),), args, None)
    builder.result(node, builder.reshape(out, node_shape(node)))


def _whole(node: Any) -> tuple[int, ...]:
    return node_shape(node) or (1,)


def _with_a_dimension(builder: Builder, expr: Expr) -> Expr:
    """Return a 0-d tensor as a 1-d tensor."""
    if expr.shape:
        return expr
    return builder.view(expr, lambda layout: layout.unsqueeze(0))


def _as_lines(
    builder: Builder, node: Any, dtype: str, dim: int, sizes: tuple[int, ...] | None = None
) -> Expr:
    """Return a tensor, cut to `sizes` if they are given, with dimension `dim` last."""
    expr = _with_a_dimension(builder, cast(builder, builder.expr(node), dtype))
    for d, size in enumerate(sizes or ()):
        if size != expr.shape[d]:
            first = functools.partial(Layout.narrow, dim=d, start=0, length=size)
            expr = builder.view(expr, first)
    rank = len(expr.shape)
    order = [d for d in range(rank) if d != dim % rank] + [dim % rank]
    return builder.view(expr, lambda layout: layout.permute(order))


def _start(how: str, dtype: str) -> float | int:
    """Return the neutral element of a macro of JOINS."""
    if how in ("ADD", "MULTIPLY"):
        return int(how == "MULTIPLY")
    sign = -1 if how == "LARGER" else 1
    if dtype in FLOATS:
        return sign * math.inf
    if dtype == "bool":
        return int(sign > 0)
    limits = np.iinfo(dtype)
    return int(limits.min if how == "LARGER" else limits.max)
