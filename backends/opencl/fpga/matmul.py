"""Matrix products on FPGAs."""

from __future__ import annotations

from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.product import Product
from .dataflow import launch


def systolic_product(builder: Builder, p: Product) -> Value:
    """Compute C of a product, row-major, of shape (batch, rows, cols)."""
    a, b = p.left, p.right
    return launch(
        builder, "matmul", ["fpga/matmul.cl"], (p.batch, p.rows, p.cols),
        {
            "a": a.value, "a_offset": a.offset, "a_batch": a.batch, "a_row": a.row, "a_k": a.col,
            "b": b.value, "b_offset": b.offset, "b_batch": b.batch, "b_k": b.row, "b_col": b.col,
        },
        {"batches": p.batch, "rows": p.rows, "cols": p.cols, "depth": p.depth},
        p.scaling,
    )  # fmt: skip
