"""Matrix products: `alpha * A @ B + beta * bias`, batched, with any strides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from ..builder import Builder, Kernel, Launch, Value
from ..fpga import systolic_product
from ..gpu import tiled_product
from ..product import Operand, Product
from ..signature import Argument, bind
from ._common import operands
from ._float32 import arguments, why_not_float32_product
from .registry import lowers

ROWS, COLS = 12, 32
"""The register tile of `kernels/cpu/matmul.cl`: 24 accumulators of 16 lanes."""
DEPTH_CHUNK = 128
"""Steps of K that one work-item packs."""
OF_FAMILIES = {"gpu": tiled_product, "fpga": systolic_product}
THIN_ROWS = 2
THIN_OPERATIONS = 1 << 14
"""Sizes up to which packing costs more than it saves."""


def lower_product(builder: Builder, product: Product) -> Value:
    """Add the launches of a product; returns C, (batch, rows, cols) row-major."""
    family = OF_FAMILIES.get(builder.device.family)
    if family is not None:
        return family(builder, product)
    thin = min(product.rows, product.cols) <= THIN_ROWS
    if thin or product.rows * product.cols * product.depth <= THIN_OPERATIONS:
        return _thin(builder, product)
    return _packed(builder, product)


def depth_blocks(depth: int, most: int) -> list[tuple[int, int]]:
    """Equal ranges of K of at most `most`."""
    count = math.ceil(depth / most)
    return [(depth * i // count, depth * (i + 1) // count) for i in range(count)]


def _packed(builder: Builder, p: Product) -> Value:
    row_panels, col_panels = math.ceil(p.rows / ROWS), math.ceil(p.cols / COLS)
    left = builder.new((p.batch, row_panels, p.depth, ROWS), "float32")
    right = builder.new((p.batch, col_panels, p.depth, COLS), "float32")
    out = builder.new((p.batch, p.rows, p.cols), "float32")
    packs = [
        _pack_right(builder, p.right, p.cols, right),
        _pack_left(builder, p.left, p.rows, left),
    ]
    tiles = [
        _launch(
            builder, "matmul", (row_panels, col_panels, p.batch),
            {
                "left": left, "right": right, "c": out, "rows": p.rows, "cols": p.cols,
                "depth": p.depth, "k0": k0, "k1": k1, **p.scaling,
            },
            step=ROWS * p.cols if p.batch == 1 and k1 == p.depth else 0,
        )
        for k0, k1 in depth_blocks(p.depth, builder.device.tuning.depth_block)
    ]  # fmt: skip
    builder.product(out, [*packs, *tiles])
    return out


def pack_rows(builder: Builder, a: Operand, rows: int, depth: int, batch: int = 1) -> Value:
    """A, rows x depth, in panels of ROWS rows: [batch][panels][depth][ROWS], zero-padded."""
    packed = builder.new((batch, math.ceil(rows / ROWS), depth, ROWS), "float32")
    builder.add(_pack_left(builder, a, rows, packed))
    return packed


def _pack_left(builder: Builder, a: Operand, rows: int, packed: Value) -> Launch:
    batch, panels, depth, _ = packed.shape
    return _launch(
        builder, "pack_left", (panels, _chunks(depth), batch),
        {
            "a": a.value, "offset": a.offset, "batch_stride": a.batch, "stride_row": a.row,
            "stride_k": a.col, "rows": rows, "depth": depth, "left": packed,
        },
        steady=builder.steady(a.value),
    )  # fmt: skip


def pack_columns(builder: Builder, b: Operand, depth: int, cols: int, batch: int = 1) -> Value:
    """B, depth x cols, in panels of COLS columns: [batch][panels][depth][COLS], zero-padded."""
    packed = builder.new((batch, math.ceil(cols / COLS), depth, COLS), "float32")
    builder.add(_pack_right(builder, b, cols, packed))
    return packed


def _pack_right(builder: Builder, b: Operand, cols: int, packed: Value) -> Launch:
    batch, panels, depth, _ = packed.shape
    return _launch(
        builder, "pack_right", (panels, _chunks(depth), batch),
        {
            "b": b.value, "offset": b.offset, "batch_stride": b.batch, "stride_col": b.col,
            "stride_k": b.row, "cols": cols, "depth": depth, "right": packed,
        },
        steady=builder.steady(b.value),
    )  # fmt: skip


def _launch(
    builder: Builder, name: str, size: tuple[int, ...], args: Mapping[str, Argument],
    steady: bool = False, step: int = 0,
) -> Launch:  # fmt: skip
    kernel = _kernel(builder, name)
    return Launch(kernel, size, (1, 1, 1), bind(kernel, args), steady=steady, step=step)


def _chunks(depth: int) -> int:
    return math.ceil(depth / DEPTH_CHUNK)


def _thin(builder: Builder, p: Product) -> Value:
    out = builder.new((p.batch, p.rows, p.cols), "float32")
    c_row, c_col = p.cols, 1
    if p.cols < p.rows and p.cols <= THIN_ROWS:  # C^T = B^T A^T has long rows
        bias = p.bias.transposed if p.bias else None
        p = replace(p, rows=p.cols, cols=p.rows, left=p.right.transposed,
                    right=p.left.transposed, bias=bias)  # fmt: skip
        c_row, c_col = 1, p.rows
    a, b = p.left, p.right
    builder.launch(
        _kernel(builder, "matmul_thin"), (math.ceil(p.cols / 16), p.rows, p.batch), (1, 1, 1),
        {
            "a": a.value, "a_offset": a.offset, "a_batch": a.batch, "a_row": a.row, "a_k": a.col,
            "b": b.value, "b_offset": b.offset, "b_batch": b.batch, "b_k": b.row, "b_col": b.col,
            "c": out, "c_batch": p.rows * p.cols, "c_row": c_row, "c_col": c_col, "cols": p.cols,
            "depth": p.depth, **p.scaling,
        },
    )  # fmt: skip
    return out


def _kernel(builder: Builder, name: str) -> Kernel:
    source = builder.source("cpu/common.cl") + builder.source("cpu/matmul.cl")
    return Kernel(source, name, tuple(f"-D{each}" for each in builder.device.defines))


def _operand(builder: Builder, node: fx.Node, shape: Sequence[int]) -> Operand:
    """The argument broadcast to `shape`, (rows, cols) or (batch, rows, cols)."""
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
    if depth == 0 or 0 in shape:  # a sum of nothing
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
    builder.result(node, builder.reshape(lower_product(builder, product), shape))


@lowers("aten.mm.default", "aten.bmm.default", supports=why_not_float32_product, kept=True)
def matmul(builder: Builder, node: fx.Node) -> None:
    """`mm(A, B)` and `bmm(A, B)`."""
    _lower(builder, node, arguments(node)[0], arguments(node)[1], None, beta=0.0, alpha=1.0)


@lowers("aten.addmm.default", supports=why_not_float32_product, kept=True)
@lowers("aten.baddbmm.default", supports=why_not_float32_product)
def biased_matmul(builder: Builder, node: fx.Node) -> None:
    """`beta * bias + alpha * A @ B`, the bias broadcast."""
    bias, left, right = arguments(node)[:3]
    beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    assert isinstance(beta, (int, float))
    assert isinstance(alpha, (int, float))
    _lower(builder, node, left, right, bias, float(beta), float(alpha))
