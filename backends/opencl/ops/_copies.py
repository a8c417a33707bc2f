"""Batched products without copies of their operands and results.

Torch's batched product has one dimension for its matrices. Attention has two, samples and heads,
and its matrices are interleaved in memory: no single stride leads from each matrix to the next. So
a graph has a copy before the product and another after it. The kernels of the family `cpu` accept
two strides and read the source of the first copy. The second copy becomes the product's epilogue.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import fx

from ..lower.builder import Builder, node_shape
from ..lower.expr import Expr, Layout, Load
from ..lower.product import Operand, Product
from .view import views_after

Run = tuple[int, int]
"""A number of elements or matrices, and the stride from each to the next."""


def at_sources(builder: Builder, p: Product) -> Product:
    """Return the same product, with copied operands replaced by the sources of the copies."""
    sides = (p.left, (p.batch, p.rows, p.depth)), (p.right, (p.batch, p.depth, p.cols))
    sources = [_at_source(builder, *side) for side in sides]
    counts = {runs[1][0] for _, runs in sources if len(runs) == 2}
    if len(counts) != 1:  # no copies, or operands with different numbers of heads
        return p
    (inner,) = counts
    left, right = (
        replace(x, batch=runs[-1][1], outer=runs[0][1] if len(runs) == 2 else inner * runs[-1][1])
        for x, runs in sources
    )
    return replace(p, left=left, right=right, inner=inner)


def _at_source(
    builder: Builder, operand: Operand, shape: tuple[int, int, int]
) -> tuple[Operand, list[Run]]:
    """Return the operand in the source of its copy, and the runs of its matrices there.

    `shape` is (matrices, rows, cols). The operand does not change if it is no copy, or if the
    kernels could not read the source as fast.
    """
    here = operand, [(shape[0], operand.batch)]
    source = builder.source_of(operand.value)
    if source is None or operand.offset:
        return here
    strides = operand.batch, operand.row, operand.col
    matrices, *sides = (_runs(source, *each) for each in zip(shape, strides, strict=True))
    if not 1 <= len(matrices) <= 2 or any(len(side) != 1 for side in sides):
        return here
    row, col = (side[0][1] for side in sides)
    if 1 not in (row, col):
        return here
    return Operand(source.value, source.layout.offset, 0, row, col), matrices


def _runs(source: Load, size: int, stride: int) -> list[Run]:
    """Return the fewest runs, in `source`, of `size` elements that are `stride` apart in its copy.

    There are none if the elements do not form whole dimensions.
    """
    if size == 1:
        return [(1, 0)]
    layout = source.layout
    steps = Layout.row_major(layout.shape).strides
    last = next((d for d, step in enumerate(steps) if step == stride and stride), None)
    if last is None:
        return []
    for first in range(last, -1, -1):
        dims = slice(first, last + 1)
        if math.prod(layout.shape[dims]) == size:
            return Layout(layout.shape[dims], layout.strides[dims]).runs()
    return []


def is_turned_later(node: fx.Node) -> bool:
    """Return whether later views exchange the rows and the columns of a product."""
    layout = Layout.row_major(node_shape(node))
    cols = node_shape(node)[-1]
    for view in views_after(node):
        seen = view(layout)
        if seen is None:
            break
        layout = seen
    return cols > 1 and layout.strides[-1:] == (cols,)


def copy_at_once(builder: Builder, expr: Expr, node: fx.Node) -> None:
    """Store the later copy of a product now, so that the copy can be the product's epilogue."""
    for view in views_after(node):
        seen = builder.pool.view(expr, view)
        if seen is None:
            builder.store(expr)
            return
        expr = seen
