"""Modelled seconds on FPGA boards, in the spirit of FPDeep (algorithm of BaPipe's section 4.3).

The DSPs are divided among the layers and passes of a stage in proportion to their operations. So a
stage takes its operations over the throughput of all DSPs,

    seconds = operations / (2 f DSP u e / d)

with the clock f, d DSPs for a multiplication and addition, the share u of DSPs that a design can
use and its efficiency e; the product u e is calibrated by measured designs. A layer's bytes beyond
the memory on the chip cross the board's memory, which may take longer.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from hetpipe.cost.board import Board, Fabric
from hetpipe.cost.work import Kernel
from hetpipe.errors import CostError

MEMORY_SHARE = 0.8
"""The share of the memory's bandwidth that long bursts reach. (An estimate.)"""


def throughput(fabric: Fabric, dtype: str = "float32", working: float | None = None) -> float:
    """Operations per second of all DSPs. `working` is u e; by default the board's own.

    Raises `CostError` for a dtype of which the board does not say the DSPs.
    """
    if dtype not in fabric.dsp_per_mac:
        there = ", ".join(fabric.dsp_per_mac)
        raise CostError(f"no DSPs are given for {dtype}; there are those for {there}")
    share = fabric.usable * fabric.efficiency if working is None else working
    return 2 * fabric.clock_Hz * fabric.dsp * share / fabric.dsp_per_mac[dtype]


def kernels_s(board: Board, kernels: Iterable[Kernel], dtype: str = "float32") -> float:
    """Seconds of a layer's kernels in one pass. Raises `CostError` for a board without a fabric."""
    if board.fabric is None:
        raise CostError(f"{board.id} has no fabric; it is no FPGA")
    each = list(kernels)
    computing_s = sum(kernel.operations for kernel in each) / throughput(board.fabric, dtype)
    beyond = max(0, sum(kernel.nbytes for kernel in each) - board.fabric.on_chip_nbytes)
    return board.launch_s + max(computing_s, beyond / (board.memory_Bps * MEMORY_SHARE))


def calibrate(measured: Sequence[tuple[Fabric, float]], dtype: str = "float32") -> float:
    """The product u e of measured designs: the median of measured over full throughput.

    `measured` are fabrics at the clock of a design, with its operations per second. Raises
    `CostError` without one.
    """
    if not measured:
        raise CostError("no measured design to calibrate by; give one or more")
    return statistics.median(rate / throughput(fabric, dtype, 1.0) for fabric, rate in measured)
