"""Views, concatenation, padding and scatter of slices. Views that strides express cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import fx

from hetpipe.sdk.graph import operator_name, strided_offset, why_not_strided

from ..lower.builder import Builder, node_dtype, node_shape
from ..lower.expr import Const, Expr, Layout, Load, View
from ..lower.registry import lowers
from ._common import argument, cast


def _define_view(builder: Builder, node: fx.Node, view: View) -> None:
    builder.define(node, builder.view(builder.expr(node.args[0]), view))


RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default",
            "aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default",
            "aten.flatten.using_ints", "aten.unsqueeze.default")  # fmt: skip
PERMUTATIONS = "aten.permute.default", "aten.t.default", "aten.transpose.int"


@lowers(*RESHAPES, *PERMUTATIONS)
def reordered(builder: Builder, node: fx.Node) -> None:
    view = view_of(node)
    assert view is not None
    builder.define(node, builder.view(builder.expr(node.args[0]), view))


def view_of(node: fx.Node) -> View | None:
    """Return the view of a reshape or a permutation, or None for other nodes."""
    name = operator_name(node)
    if name in RESHAPES:
        return partial(Layout.reshape, shape=node_shape(node))
    if name in PERMUTATIONS:
        return partial(Layout.permute, order=_order(node))
    return None


def views_after(node: fx.Node) -> Iterator[View]:
    """Yield the views that follow `node`, each the only user of its argument."""
    while len(node.users) == 1:
        (node,) = node.users
        view = view_of(node)
        if view is None:
            return
        yield view


def _order(node: fx.Node) -> list[int]:
    """Return, for each dimension of a permutation's result, the dimension of its argument."""
    rank = len(node_shape(node))
    order: list[int] = list(range(rank))
    name = operator_name(node)
    if name == "aten.permute.default":
        dims: Any = node.args[1]
        order = [d % rank for d in dims]
    elif name == "aten.transpose.int":
        a, b = (_dim(arg, rank) for arg in node.args[1:3])
        order[a], order[b] = b, a
    else:
        order.reverse()
    return order


@lowers("aten.expand.default")
def expand(builder: Builder, node: fx.Node) -> None:
    builder.define(node, builder.expr(node.args[0], node_shape(node)))


@lowers("aten.slice.Tensor")
def slice_(builder: Builder, node: fx.Node) -> None:
    dim, start, step = _slice(node, 1)
    length = node_shape(node)[dim]
    _define_view(builder, node, lambda x: x.narrow(dim, start, length, step))


def _slice(node: fx.Node, first: int) -> tuple[int, int, int]:
    """Return dimension, start and step of a slice whose arguments begin at `first`."""
    tensor: Any = node.args[0]
    shape = node_shape(tensor)
    dim = _dim(argument(node, first, "dim", 0), len(shape))
    start = argument(node, first + 1, "start", None) or 0
    start = min(max(start + shape[dim] if start < 0 else start, 0), shape[dim])
    return dim, start, argument(node, first + 3, "step", 1)


def _dim(dim: Any, rank: int) -> int:
    return int(dim) % max(rank, 1)


@lowers("aten.select.int")
def select(builder: Builder, node: fx.Node) -> None:
    tensor, dim, index = _selected(node, 1)
    dim = _dim(dim, len(tensor))
    _define_view(builder, node, lambda x: x.select(dim, index % tensor[dim]))


def _selected(node: fx.Node, first: int) -> tuple[tuple[int, ...], int, int]:
    tensor: Any = node.args[0]
    index: Any = node.args[first + 1]
    shape = node_shape(tensor)
    return shape, _dim(node.args[first], len(shape)), int(index)


@lowers("aten.as_strided.default", supports=why_not_strided)
def as_strided(builder: Builder, node: fx.Node) -> None:
    """Apply the strides to the operand, which is row-major: tracing refuses other layouts."""
    source = builder.value(node.all_input_nodes[0])
    strides: Any = node.args[2]
    layout = Layout(node_shape(node), tuple(strides), strided_offset(node))
    builder.define(node, builder.pool.make(Load, layout.shape, source.dtype, source, layout))


@lowers("aten.diagonal.default")
def diagonal(builder: Builder, node: fx.Node) -> None:
    source: Any = node.args[0]
    rank, size = len(node_shape(source)), node_shape(node)[-1]
    offset = argument(node, 1, "offset", 0)
    rows, cols = _dim(argument(node, 2, "dim1", 0), rank), _dim(argument(node, 3, "dim2", 1), rank)
    others = [d for d in range(rank) if d not in (rows, cols)]

    def view(x: Layout) -> Layout:
        first = max(0, -offset) * x.strides[rows] + max(0, offset) * x.strides[cols]
        step = x.strides[rows] + x.strides[cols]
        shape = (*(x.shape[d] for d in others), size)
        return Layout(shape, (*(x.strides[d] for d in others), step), x.offset + first)

    _define_view(builder, node, view)


@lowers("aten.flip.default")
def flip(builder: Builder, node: fx.Node) -> None:
    shape = node_shape(node)
    dims: Any = node.args[1]
    expr = builder.expr(node.args[0])
    for d in (dim % len(shape) for dim in dims):
        last = partial(Layout.narrow, dim=d, start=shape[d] - 1, length=shape[d], step=-1)
        expr = builder.view(expr, last)
    builder.define(node, expr)


@lowers(
    "aten.split_with_sizes.default", "aten.split.Tensor", "aten.unbind.int", "aten.chunk.default"
)
def split(builder: Builder, node: fx.Node) -> None:
    source: Any = node.args[0]
    unbind = operator_name(node) == "aten.unbind.int"
    dim = _dim(argument(node, 1 if unbind else 2, "dim", 0), len(node_shape(source)))
    expr, parts, begin = builder.expr(source), [], 0
    for part in node.meta["val"]:
        size = 1 if unbind else int(part.shape[dim])
        view = partial(Layout.narrow, dim=dim, start=begin, length=size)
        if unbind:
            view = partial(Layout.select, dim=dim, index=begin)
        parts.append(builder.view(expr, view))
        begin += size
    builder.define_results(node, tuple(parts))


@lowers("getitem")
def getitem(builder: Builder, node: fx.Node) -> None:
    source: Any = node.args[0]
    index: Any = node.args[1]
    expr = builder.results(source)[index]
    if expr is not None:
        builder.define(node, expr)


@lowers("aten.repeat.default")
def repeat(builder: Builder, node: fx.Node) -> None:
    shape = node_shape(node)
    repeats: Any = node.args[1]
    expr = builder.expr(node.args[0])
    sizes = (1,) * (len(shape) - len(expr.shape)) + expr.shape
    spread = tuple(n for pair in zip(repeats, sizes, strict=True) for n in pair)
    paired = tuple(n for size in sizes for n in (1, size))
    expr = builder.view(expr, lambda layout: layout.reshape(paired))
    value = builder.store(builder.expand(expr, spread))
    builder.define(node, builder.pool.load(builder.reshape(value, shape)))


@lowers("aten.cat.default", "aten.stack.default")
def cat(builder: Builder, node: fx.Node) -> None:
    parts: Any = node.args[0]
    shape, dtype = node_shape(node), node_dtype(node)
    dim = _dim(argument(node, 1, "dim", 0), len(shape))
    exprs = [cast(builder, builder.expr(part), dtype) for part in parts]
    if operator_name(node) == "aten.stack.default":
        exprs = [builder.view(expr, lambda x: x.unsqueeze(dim)) for expr in exprs]
    out, whole, begin = builder.new(shape, dtype), Layout.row_major(shape), 0
    for expr in exprs:
        # torch ignores empty vectors among tensors of any rank.
        if len(expr.shape) == len(shape) and expr.shape[dim] > 0:
            part = whole.narrow(dim, begin, expr.shape[dim])
            builder.store_into(expr, out, part)
            begin += expr.shape[dim]
    builder.define(node, builder.pool.load(out))


@lowers("aten.constant_pad_nd.default")
def constant_pad(builder: Builder, node: fx.Node) -> None:
    pads: Any = node.args[1]
    shape, dtype = node_shape(node), node_dtype(node)
    number = argument(node, 2, "value", 0)
    expr = builder.expr(node.args[0])
    target = Layout.row_major(shape)
    for at in range(len(pads) // 2):
        dim, before, after = len(shape) - 1 - at, pads[2 * at], pads[2 * at + 1]
        # A negative pad cuts: it reads fewer elements.
        skip, room = max(0, -before), expr.shape[dim] + min(0, before) + min(0, after)
        expr = builder.view(expr, partial(Layout.narrow, dim=dim, start=skip, length=room))
        target = target.narrow(dim, max(0, before), room)
    fill = cast(builder, builder.pool.make(Const, shape, "float32", float(number)), dtype)
    _define_over(builder, node, fill, expr, target)


@lowers("aten.slice_scatter.default", "aten.select_scatter.default")
def scatter_view(builder: Builder, node: fx.Node) -> None:
    whole = Layout.row_major(node_shape(node))
    part = builder.expr(node.args[1])
    if operator_name(node) == "aten.select_scatter.default":
        shape, dim, index = _selected(node, 2)
        target = whole.select(dim, index % shape[dim])
    else:
        dim, start, step = _slice(node, 2)
        target = whole.narrow(dim, start, part.shape[dim], step)
    _define_over(builder, node, builder.expr(node.args[0]), part, target)


def _define_over(builder: Builder, node: fx.Node, below: Expr, above: Expr, target: Layout) -> None:
    out = builder.store_copy(below)
    builder.store_into(cast(builder, above, below.dtype), out, target)
    builder.define(node, builder.pool.load(out))
