"""The parameters of the systolic array of `kernels/fpga/dataflow.cl`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Array:
    """A chain of processing elements, and the on-chip buffers about it; all sizes in floats."""

    rows: int = 8
    """Processing elements; a row of C in each of them at a time."""
    cols: int = 16
    """Multiply-adds of an element in each cycle."""
    interleave_rows: int = 8
    interleave_cols: int = 8
    """Vectors of sums that an element keeps, and adds to in turn, are the product of both."""
    block: int = 32
    """Steps of k in block RAM."""
    capacity: int = 2048
    """Vectors that a channel holds."""
    load_width: int = 16
    """Floats that are read from memory in each cycle."""

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of C that are summed at once."""
        return self.rows * self.interleave_rows, self.cols * self.interleave_cols

    @property
    def turns(self) -> int:
        """Cycles of a step of k; also those from one addition to a sum until the next."""
        return self.interleave_rows * self.interleave_cols

    @property
    def options(self) -> tuple[str, ...]:
        """Of the kernels' source."""
        return (
            f"-DARRAY_ROWS={self.rows}", f"-DARRAY_COLS={self.cols}",
            f"-DINTERLEAVE_ROWS={self.interleave_rows}",
            f"-DINTERLEAVE_COLS={self.interleave_cols}", f"-DBLOCK={self.block}",
            f"-DCAPACITY={self.capacity}", f"-DLOAD_WIDTH={self.load_width}",
        )  # fmt: skip


ARRAY = Array()
"""That of all kernels of the family."""
ROW_COLS = 256
"""Columns of the longest rows that are kept on the chip for a kernel over rows."""
