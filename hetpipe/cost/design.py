"""Designs: hardware for matrix products in an FPGA's fabric, described by plain numbers.

The author of the kernels gives these numbers. With a design, `hetpipe.cost.fpga` prices a product
by its tiles, so the price includes tiles that the product fills only in part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetpipe.cost.board import Board
from hetpipe.cost.work import ProductShape
from hetpipe.errors import CostError


@dataclass(frozen=True)
class ProductDesign:
    """One array that computes products tile by tile; a board has as many arrays as fit.

    A tile takes `step_cycles` for each step of the sum over the depth, and `tile_cycles` once.
    """

    name: str
    macs: int
    """Multiply-adds of the product that begin in every cycle."""
    further_macs: int
    """Further multiply-adds for which the array has DSPs, as for a bias."""
    block_ram_nbytes: int
    tile_rows: int
    tile_cols: int
    step_cycles: float
    tile_cycles: float

    def tiles(self, shape: ProductShape) -> int:
        """Return the number of tiles of a product."""
        down = math.ceil(shape.rows / self.tile_rows)
        return shape.batches * down * math.ceil(shape.cols / self.tile_cols)

    def cycles(self, shape: ProductShape, arrays: int = 1) -> float:
        """Return the cycles of a product whose tiles are divided among several arrays."""
        each = shape.depth * self.step_cycles + self.tile_cycles
        return math.ceil(self.tiles(shape) / arrays) * each

    def efficiency(self, shape: ProductShape) -> float:
        """Return the share of an array's multiply-adds that the product uses."""
        cycles = self.cycles(shape)
        return shape.macs / (self.macs * cycles) if cycles else 0.0

    def arrays(self, board: Board, dtype: str = "float32") -> int:
        """Return how many arrays fit on a board, by its DSPs and the memory on its chip.

        Raises `CostError` for a board without a fabric, or if not even one array fits.
        """
        if board.fabric is None:
            raise CostError(f"{board.id} has no fabric; it is no FPGA")
        fabric = board.fabric
        dsp = (self.macs + self.further_macs) * fabric.dsp_per_mac[dtype]
        by_dsp = int(fabric.dsp * fabric.usable / dsp)
        by_memory = fabric.on_chip_nbytes // self.block_ram_nbytes
        if min(by_dsp, by_memory) < 1:
            raise CostError(
                f"the design {self.name} does not fit on {board.id}: it needs {dsp:.0f} DSPs and "
                f"{self.block_ram_nbytes} bytes on the chip, but the board has "
                f"{fabric.dsp * fabric.usable:.0f} and {fabric.on_chip_nbytes}"
            )
        return min(by_dsp, by_memory)
