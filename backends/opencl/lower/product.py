"""Matrix products that lowerings request, independent of the kernels that compute them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .expr import Value
from .signature import Argument


@dataclass(frozen=True)
class Operand:
    """A batch of matrices in memory; `batch`, `row`, `col` and `outer` are strides in elements.

    `outer` is the stride from one group of matrices to the next, see `Product.inner`.
    """

    value: Value
    offset: int
    batch: int
    row: int
    col: int
    outer: int = 0

    @property
    def transposed(self) -> Operand:
        """The same memory with rows and columns exchanged."""
        return replace(self, row=self.col, col=self.row)


@dataclass(frozen=True)
class Product:
    """The product C = alpha * left @ right + beta * bias; left: rows x depth, right: depth x cols.

    The `batch` matrices of an operand form groups of `inner` matrices; 0 means one group.
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
        """Kernel arguments alpha, beta, bias and its strides; `left` replaces a missing bias."""
        bias = self.bias or replace(self.left, offset=0, batch=0, row=0, col=0)
        beta = float(self.beta) if self.bias else 0.0
        return {
            "alpha": float(self.alpha), "beta": beta, "bias": bias.value,
            "bias_offset": bias.offset, "bias_batch": bias.batch, "bias_row": bias.row,
            "bias_col": bias.col,
        }  # fmt: skip
