"""Matrix products: `alpha * A @ B + beta * bias`, batched, with any strides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..fpga.dataflow import systolic_product
from ..gpu.tiles import tiled_product
from ..lower.builder import Builder
from ..lower.expr import Expr, Value
from ..lower.launch import BLOCKS, Kernel, Launch, Panels, Tile
from ..lower.product import Operand, Product
from ..lower.registry import lowers
from ..lower.signature import Argument, bind
from ..lower.target import Target
from ._common import arguments, operands, why_not_float32_product
from ._copies import at_sources, copy_at_once, is_turned_later

ROWS, COLS = 12, 32
"""The register tile of `kernels/cpu/matmul.cl`: 24 accumulators of 16 lanes."""
GROUP = 2
"""Panels (of COLS columns) that are packed together if they are neighbours in memory."""
DEPTH_CHUNK = 128
"""Steps of K that one work-item packs."""
BALANCE, LARGE_PANELS = 4, 16
"""Target parts per compute unit; stop splitting below LARGE_PANELS panels of rows or columns."""
FEW_PANELS = 8
"""Tiles per panel below which the time of packing matters: packing takes as long as half a tile."""
MOST_PASSES = 16
"""Panels of columns up to which packing rows of A does not pay. Without packing, 12 to 16 panels
take 1 to 6 % less time, 32 panels the same time, and 48 panels 3 to 5 % more."""
FEW_ROWS = 4
"""A tile at the edge has a multiple of FEW_ROWS rows."""
SETS, LINE_NBYTES = 64, 64
"""Fewest sets of a first-level cache, and bytes per line; more sets only spread lines better."""
MOST_LINES = 6
"""Most lines of a tile's rows in one set of the cache; a set holds at least 8 lines."""
PACKED, IN_PLACE = "packed", "in_place"
OF_FAMILIES = {"gpu": tiled_product, "fpga": systolic_product}
THIN_ROWS = 2
THIN_OPERATIONS = 1 << 14
"""Sizes up to which packing costs more than it saves."""


def lower_product(builder: Builder, product: Product) -> Value:
    """Add the launches of a product and return C, row-major (batch, rows, cols)."""
    family = OF_FAMILIES.get(builder.device.family)
    if family is not None:
        return family(builder, product)
    thin = min(product.rows, product.cols) <= THIN_ROWS
    if thin or product.rows * product.cols * product.depth <= THIN_OPERATIONS:
        return _thin(builder, product)
    return _tiled(builder, product)


@dataclass(frozen=True)
class Parts:
    """Division of a product's rows and columns into parts; a work-item has a part of each."""

    rows: int
    """Rows of a part, a multiple of ROWS."""
    cols: int
    """Columns of a part, a multiple of COLS."""
    counts: tuple[int, int]
    """Number of parts of the rows, and of the columns."""


def parts_of(device: Target, p: Product) -> Parts:
    """Return one part per compute unit, more if parts are large; streaming needs parts of few rows.

    Each part packs its rows of A and its columns of B, so few large parts do less work.
    """
    panels = (math.ceil(p.rows / ROWS), math.ceil(p.cols / COLS))
    counts, units = [1, 1], device.compute_units
    while True:
        sizes = [total / count for total, count in zip(panels, counts, strict=True)]
        items, side = p.batch * math.prod(counts), sizes.index(max(sizes))
        more = items < units and sizes[side] >= 2
        if not (more or (units > 1 and items < BALANCE * units and sizes[side] >= LARGE_PANELS)):
            break
        counts[side] *= 2
    rows = math.ceil(panels[0] / counts[0]) * ROWS
    if device.info.capabilities.chunks:
        rows = min(rows, max(1, panels[0] // BLOCKS) * ROWS)
    cols = math.ceil(panels[1] / counts[1]) * COLS
    return Parts(rows, cols, (math.ceil(p.rows / rows), math.ceil(p.cols / cols)))


def depth_blocks(depth: int, most: int) -> list[tuple[int, int]]:
    """Return equal ranges of K, each of at most `most`."""
    count = math.ceil(depth / most)
    return [(depth * i // count, depth * (i + 1) // count) for i in range(count)]


def _tiled(builder: Builder, p: Product) -> Value:
    """Add launches of `matmul`, one for each block of depth, and return C."""
    p = at_sources(builder, p)
    parts = parts_of(builder.device, p)
    packs, forms, left, right = _operands(builder, p, parts)
    blocks = depth_blocks(p.depth, builder.device.tuning.depth_block)
    longest = max(k1 - k0 for k0, k1 in blocks)
    # In `room`, panels of A follow a group of panels of B, even if another launch packs B.
    own_rows = parts.rows if forms[0] not in (PACKED, IN_PLACE) else 0
    panels = GROUP * COLS + own_rows if own_rows or forms[1] != PACKED else 0
    room = builder.new((p.batch * math.prod(parts.counts), max(1, longest * panels)), "float32")
    out = builder.new((p.batch, p.rows, p.cols), "float32")
    kernel = _kernel(builder, "matmul", "EPILOGUE", f"LEFT={forms[0]}", f"RIGHT={forms[1]}")
    tiles = [
        _launch(
            kernel, (*parts.counts, p.batch),
            {
                "inner": p.inner or p.batch, "left": left.value, "left_offset": left.offset,
                "left_outer": left.outer, "left_batch": left.batch, "left_row": left.row,
                "left_k": left.col, "right": right.value, "right_offset": right.offset,
                "right_outer": right.outer, "right_batch": right.batch, "right_k": right.row,
                "right_col": right.col, "room": room, "room_size": room.shape[1],
                "part_rows": parts.rows, "part_cols": parts.cols, "c": out, "rows": p.rows,
                "cols": p.cols, "depth": p.depth, "k0": k0, "k1": k1, **p.scaling,
            },
            step=parts.rows * p.cols if p.batch == 1 and k1 == p.depth else 0,
        )
        for k0, k1 in blocks
    ]  # fmt: skip
    builder.product(out, Tile(out.shape, out.dtype, (*packs, *tiles), panels=forms))
    return out


def _operands(
    builder: Builder, p: Product, parts: Parts
) -> tuple[list[Launch], Panels, Operand, Operand]:
    """Return launches that pack ahead, the forms of both operands' panels, and the operands.

    A work-item packs its panels itself, or reads A in place if that suits. A weight that each
    work-item uses only a few times is packed by another launch, once for every update.
    """
    packs, left, right = [], p.left, p.right
    forms = [_form(left.row, left.col), _form(right.col, right.row)]
    if builder.steady(left.value) and parts.cols < FEW_PANELS * COLS:
        packed, launch = _packed(builder, "left", left, p.rows, p.depth, p.batch)
        left, forms[0] = _of_panels(packed), PACKED
        packs.append(launch)
    elif suits_in_place(p, parts):
        forms[0] = IN_PLACE
    if builder.steady(right.value) and parts.rows < FEW_PANELS * ROWS:
        packed, launch = _packed(builder, "right", right, p.cols, p.depth, p.batch)
        right, forms[1] = _of_panels(packed).transposed, PACKED
        packs.append(launch)
    return packs, (forms[0], forms[1]), left, right


def suits_in_place(p: Product, parts: Parts) -> bool:
    """Return whether to read rows of A in place, because few panels of B use each row.

    The lines of a tile's rows must stay in a first-level cache from one k to the next. If rows are
    a large power of two apart, too many lines share a set of the cache.
    """
    lines = Counter(row * 4 * p.left.row // LINE_NBYTES % SETS for row in range(ROWS))
    return (
        p.left.col == 1
        and p.rows % FEW_ROWS == 0
        and parts.cols <= MOST_PASSES * COLS
        and max(lines.values()) <= MOST_LINES
    )


def _form(along_panel: int, along_depth: int) -> str:
    """Return which function of `kernels/cpu/matmul.cl` packs an operand with these strides."""
    if along_panel == 1:
        return "contiguous"
    return "transposed" if along_depth == 1 else "strided"


def _of_panels(packed: Value) -> Operand:
    """Return panels as an operand: `row` is the depth, and `col` the width of a panel."""
    _, panels, depth, width = packed.shape
    return Operand(packed, 0, panels * depth * width, depth, width)


def pack(
    builder: Builder, side: str, operand: Operand, lanes: int, depth: int, batch: int = 1
) -> Value:
    """Pack rows of A, if `side` is "left", or columns of B, if it is "right", in panels.

    The result is [batch][panels][depth][ROWS or COLS], padded with zeros.
    """
    packed, launch = _packed(builder, side, operand, lanes, depth, batch)
    builder.add(launch)
    return packed


def _packed(
    builder: Builder, side: str, operand: Operand, lanes: int, depth: int, batch: int
) -> tuple[Value, Launch]:
    is_left = side == "left"
    name, line, width = ("a", "row", ROWS) if is_left else ("b", "col", COLS)
    x = operand if is_left else operand.transposed
    packed = builder.new((batch, math.ceil(lanes / width), depth, width), "float32")
    return packed, _launch(
        _kernel(builder, f"pack_{side}"), (packed.shape[1], math.ceil(depth / DEPTH_CHUNK), batch),
        {
            name: x.value, "offset": x.offset, "batch_stride": x.batch, f"stride_{line}": x.row,
            "stride_k": x.col, f"{line}s": lanes, "depth": depth, side: packed,
        },
        steady=builder.steady(x.value),
    )  # fmt: skip


def _launch(
    kernel: Kernel, size: tuple[int, ...], args: Mapping[str, Argument],
    steady: bool = False, step: int = 0,
) -> Launch:  # fmt: skip
    return Launch(kernel, size, (1, 1, 1), bind(kernel, args), steady=steady, step=step)


def _thin(builder: Builder, p: Product) -> Value:
    out = builder.new((p.batch, p.rows, p.cols), "float32")
    c_row, c_col = p.cols, 1
    if p.cols < p.rows and p.cols <= THIN_ROWS:  # C^T = B^T A^T has long rows
        bias = p.bias.transposed if p.bias else None
        p = replace(p, rows=p.cols, cols=p.rows, left=p.right.transposed,
                    right=p.left.transposed, bias=bias)  # fmt: skip
        c_row, c_col = 1, p.rows
    builder.launch(
        _kernel(builder, "matmul_thin"), (math.ceil(p.cols / 16), p.rows, p.batch),
        {
            **p.operands, "c": out, "c_batch": p.rows * p.cols, "c_row": c_row, "c_col": c_col,
            "cols": p.cols, "depth": p.depth, **p.scaling,
        },
    )  # fmt: skip
    return out


def _kernel(builder: Builder, name: str, *macros: str) -> Kernel:
    files = ("cpu/common.cl", "cpu/matmul.cl")
    return Kernel.of_files(name, files, *builder.device.defines, *macros)


def _operand(builder: Builder, node: fx.Node, shape: Sequence[int]) -> Operand:
    """Return the argument broadcast to `shape`, (rows, cols) or (batch, rows, cols)."""
    value, strides, offset = builder.strided(node)
    sizes = tuple(node.meta["val"].shape)
    missing = len(shape) - len(sizes)
    aligned = [0] * missing + [
        stride if size == want else 0
        for size, stride, want in zip(sizes, strides, shape[missing:], strict=True)
    ]
    batch, row, col = [0] * (3 - len(shape)) + aligned
    return Operand(value, offset, batch, row, col)


def _lower(
    builder: Builder, node: fx.Node, left: Any, right: Any, bias: Any, beta: float, alpha: float
) -> None:
    shape = tuple(node.meta["val"].shape)
    depth = int(left.meta["val"].shape[-1])
    if depth == 0 or 0 in shape:  # an empty sum, or no result
        given, scale = operands(builder, node, (bias if bias and beta else 0, float(beta)))
        builder.define(node, builder.apply("{0} * {1}", "float32", given, scale))
        return
    product = Product(
        batch=shape[0] if len(shape) == 3 else 1,
        rows=shape[-2],
        cols=shape[-1],
        depth=depth,
        left=_operand(builder, left, (*shape[:-1], depth)),
        right=_operand(builder, right, (*shape[:-2], depth, shape[-1])),
        bias=None if bias is None or beta == 0 else _operand(builder, bias, shape),
        alpha=alpha,
        beta=beta,
    )
    if len(shape) < 3:
        builder.result(node, builder.reshape(lower_product(builder, product), shape))
        return
    turned = bias is None and is_turned_later(node)
    if turned:  # C^T = B^T A^T
        product = replace(product, rows=product.cols, cols=product.rows,
                          left=product.right.transposed, right=product.left.transposed)  # fmt: skip
    expr: Expr = builder.pool.load(lower_product(builder, product))
    if turned:
        expr = builder.view(expr, lambda layout: layout.permute((0, 2, 1)))
    builder.define(node, expr)
    copy_at_once(builder, expr, node)


@lowers("aten.mm.default", "aten.bmm.default", supports=why_not_float32_product, kept=True)
def matmul(builder: Builder, node: fx.Node) -> None:
    _lower(builder, node, arguments(node)[0], arguments(node)[1], None, beta=0.0, alpha=1.0)


@lowers("aten.addmm.default", supports=why_not_float32_product, kept=True)
@lowers("aten.baddbmm.default", supports=why_not_float32_product)
def biased_matmul(builder: Builder, node: fx.Node) -> None:
    """Lower `beta * bias + alpha * A @ B`, with the bias broadcast."""
    bias, left, right = arguments(node)[:3]
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    assert isinstance(beta, (int, float))
    assert isinstance(alpha, (int, float))
    _lower(builder, node, left, right, bias, float(beta), float(alpha))
