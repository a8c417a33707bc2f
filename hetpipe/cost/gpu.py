"""Modelled seconds on graphics cards and processors: a roofline for each operator.

    seconds = launch + max(operations / (peak x a), bytes / (bandwidth x b))

The two shares a and b are fitted to a few measured kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetpipe.cost.board import Board
from hetpipe.cost.work import Kernel
from hetpipe.errors import CostError


@dataclass(frozen=True)
class Shares:
    """The shares of a board's peak and of its memory's bandwidth that kernels reach.

    `error` is the median relative error of predictions for kernels outside the fit.
    """

    matrix: float
    memory: float
    error: float


V100 = Shares(0.95, 0.30, 0.345)
"""Fitted to every second layer of PipeDream's VGG-16, AlexNet and ResNet-50 on a V100 (forwards of
0.1 ms and more). The error is measured on the other layers; a test repeats the fit. The error of
another model may be larger: after a fit to VGG-16 and AlexNet alone, the error for ResNet-50 is
0.50."""


def kernels_s(
    board: Board, kernels: Iterable[Kernel], shares: Shares = V100, dtype: str = "float32"
) -> float:
    """Return the seconds of kernels that run one after another. Raises `CostError` for a dtype
    without a peak."""
    if dtype not in board.peak_flops:
        there = ", ".join(board.peak_flops)
        raise CostError(f"{board.id} has no peak for {dtype}; it has {there}")
    peak = board.peak_flops[dtype] * shares.matrix
    bandwidth_Bps = board.memory_Bps * shares.memory
    return sum(
        board.launch_s + max(kernel.operations / peak, kernel.nbytes / bandwidth_Bps)
        for kernel in kernels
    )
