"""The parameters of the systolic array of `kernels/fpga/dataflow.cl`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Array:
    """A chain of processing elements and its on-chip buffers, with sizes in floats."""

    rows: int = 8
    """Processing elements; each computes one row of C at a time."""
    cols: int = 16
    """Multiply-adds of a processing element in each cycle."""
    interleave_rows: int = 8
    interleave_cols: int = 8
    """A processing element keeps interleave_rows * interleave_cols vectors of sums, and adds to
    them in turn."""
    block: int = 32
    """Steps of k in block RAM."""
    capacity: int = 2048
    """Vectors that a channel holds."""
    load_width: int = 16
    """Floats read from memory in each cycle."""

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of C that the array computes at once."""
        return self.rows * self.interleave_rows, self.cols * self.interleave_cols

    @property
    def turns(self) -> int:
        """Cycles per step of k, and between two additions to the same sum."""
        return self.interleave_rows * self.interleave_cols

    @property
    def options(self) -> tuple[str, ...]:
        """Compiler options of the kernels' source."""
        return (
            f"-DARRAY_ROWS={self.rows}", f"-DARRAY_COLS={self.cols}",
            f"-DINTERLEAVE_ROWS={self.interleave_rows}",
            f"-DINTERLEAVE_COLS={self.interleave_cols}", f"-DBLOCK={self.block}",
            f"-DCAPACITY={self.capacity}", f"-DLOAD_WIDTH={self.load_width}",
        )  # fmt: skip


ARRAY = Array()
"""The array of all kernels in the family `fpga`."""
ROW_COLS = 256
"""The most columns of rows that a kernel over rows keeps on the chip."""
