"""A matrix product that a lowering asks for, whatever kernels compute it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .expr import Value
from .signature import Argument


@dataclass(frozen=True)
class Operand:
    """A batch of matrices in memory; `batch`, `row`, `col` and `outer` are strides in elements.

    `outer` leads from one batch to the next, where a product has several: see `Product.inner`.
    """

    value: Value
    offset: int
    batch: int
    row: int
    col: int
    outer: int = 0

    @property
    def transposed(self) -> Operand:
        """The same memory, rows and columns exchanged."""
        return replace(self, row=self.col, col=self.row)


@dataclass(frozen=True)
class Product:
    """C = alpha * left @ right + beta * bias; left is rows x depth, right depth x cols.

    The `batch` matrices of an operand are in batches of `inner`; 0: in one batch.
    """

    batch: int
    rows: int
    cols: int
    depth: int
    left: Operand
    right: Operand
    bias: Operand | None = None
    alpha: float = 1.0
    beta: float = 0.0
    inner: int = 0

    @property
    def scaling(self) -> dict[str, Argument]:
        """Kernel arguments alpha, beta, bias and its strides; without a bias, any tensor."""
        bias = self.bias or replace(self.left, offset=0, batch=0, row=0, col=0)
        beta = float(self.beta) if self.bias else 0.0
        return {
            "alpha": float(self.alpha), "beta": beta, "bias": bias.value,
            "bias_offset": bias.offset, "bias_batch": bias.batch, "bias_row": bias.row,
            "bias_col": bias.col,
        }  # fmt: skip
