"""Writes at places given by index, in the same order as on processors; see `gpu/scatter.cl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..lower.builder import Builder
from ..lower.expr import Const, Coord, Expr, Layout, Value
from ..lower.launch import Kernel
from ..lower.signature import Argument
from .groups import launch_elements

SORTED_GROUP = 64
"""Work-items of a group that sorts: few sources must fill the card as well."""
FEW = 1 << 21
"""Most pairs of a line and a source for which sources are sorted.

Sorting takes a comparison for each pair of sources. Otherwise a work-item walks along a line, which
takes as long as reading the line's sources one after the other.
"""


def _kernel(name: str, macros: Sequence[str], group: int) -> Kernel:
    return Kernel.of_files(name, ("scatter.cl", "gpu/scatter.cl"), *macros, f"GROUP={group}")


def put_rows(builder: Builder, macros: Sequence[str], args: Mapping[str, Any]) -> None:
    """Join rows of a tensor to rows of `out`, with the arguments of the kernel `put_rows`."""
    given = dict(args)
    index, count = given.pop("index"), given["count"]
    order = {
        "sorted": builder.new((count,), "int32"),
        "places": builder.new((count,), "int64"),
    }
    sort = _kernel("sort_sources", macros, SORTED_GROUP)
    launch_elements(builder, sort, count, {"index": index, **order, "count": count}, SORTED_GROUP)
    put = _kernel("put_sorted", macros, SORTED_GROUP)
    launch_elements(builder, put, count * given["width"], {**given, **order})


def put_lines(
    builder: Builder, macros: Sequence[str], lines: Expr, index: Expr, out: Value, dim: int
) -> None:
    """Join `lines` to elements of `out` along dimension `dim`, the last dimension of `index`."""
    strides = Layout.row_major(out.shape).strides
    step, size, count = strides[dim], out.shape[dim], index.shape[-1]
    across = (*strides[:dim], *strides[dim + 1 :])
    number = index.numel // count
    if number * index.numel <= FEW:
        base = builder.pool.make(Coord, index.shape, "int64", Layout(index.shape, (*across, 0)))
        sizes = (builder.pool.make(Const, index.shape, "int64", n) for n in (size, step))
        there = "({0} < 0 ? {0} + {2} : {0}) * {3} + {1}"
        code = f"({{0}} >= -{{2}} && {{0}} < {{2}}) ? {there} : -1L"
        place = builder.apply(code, "int64", index, base, *sizes, weight=6)
        args = {
            "rows": builder.store(lines), "index": builder.store(place), "out": out,
            "count": index.numel, "width": 1, "table": out.numel, "skip": -1,
        }  # fmt: skip
        put_rows(builder, macros, args)
        return
    order = (len(index.shape) - 1, *range(len(index.shape) - 1))
    turned = {
        name: builder.store(builder.view(expr, lambda layout: layout.permute(order)))
        for name, expr in (("lines", lines), ("index", index))
    }
    base = builder.pool.make(Coord, index.shape[:-1], "int32", Layout(index.shape[:-1], across))
    columns: dict[str, Argument] = {
        **turned, "base": builder.store(base), "out": out, "number": number, "count": count,
        "step": step, "size": size,
    }  # fmt: skip
    kernel = _kernel("put_columns", macros, SORTED_GROUP)
    launch_elements(builder, kernel, number, columns, SORTED_GROUP)
