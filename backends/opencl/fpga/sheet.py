"""Estimates the FPGA resources of a stage's kernels without running a board's compiler.

`design` returns the numbers of a product from which `hetpipe.cost.fpga` predicts costs on boards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..lower.launch import Kernel, Launch
from .dataflow import ARRAY, ROW_COLS, Array

FLOAT = 4
PLACE = 16
"""Bytes of an `int4`."""
ADD_CYCLES = 16
"""The most cycles of a float addition at the clocks of `boards/` (an estimate)."""
FINISHES = {"matmul": 2, "convolution": 1, "convolution_input": 1, "convolution_weight": 0}
"""Multiply-adds per stored sum, by operation: for scaling and bias, without epilogue."""


@dataclass(frozen=True)
class KernelSheet:
    """The resources of one kernel."""

    kernel: str
    macs: int
    """Float multiply-adds that begin in every interval."""
    block_ram_nbytes: int
    """Bytes of on-chip buffers, and of the channels from which the kernel receives."""
    interval: int
    """Cycles between two iterations of the kernel's innermost loop that is not unrolled."""
    read_nbytes: int
    """The most bytes that the kernel reads from the board's memory in a cycle."""


@dataclass(frozen=True)
class StageSheet:
    """The resources of a stage's kernels; `others` names kernels that do not use the array."""

    kernels: tuple[KernelSheet, ...]
    others: tuple[str, ...]

    @property
    def macs(self) -> int:
        return sum(kernel.macs for kernel in self.kernels)

    @property
    def block_ram_nbytes(self) -> int:
        return sum(kernel.block_ram_nbytes for kernel in self.kernels)


def stage_sheet(launches: Sequence[Launch], array: Array = ARRAY) -> StageSheet:
    """Return the resources of a stage's kernels. Launches of the same kernel share its hardware."""
    kernels = dict.fromkeys(launch.kernel for launch in launches)
    sheets = {kernel: _sheet(kernel, array) for kernel in kernels}
    others = tuple(kernel.name for kernel, sheet in sheets.items() if sheet is None)
    return StageSheet(tuple(each for each in sheets.values() if each is not None), others)


def _sheet(kernel: Kernel, array: Array) -> KernelSheet | None:
    if kernel.generated or not set(array.options) <= set(kernel.options):
        return None
    if "-DCHANNELS" not in kernel.options:
        rows = _normalising(kernel, array).block_ram_nbytes if "-DROWS" in kernel.options else 0
        sheet = whole(array, kernel.name)
        channel = array.capacity * array.cols * FLOAT if rows else 0
        return replace(sheet, block_ram_nbytes=sheet.block_ram_nbytes + rows - channel)
    if kernel.name == "array":
        return multiplying(array)
    if kernel.name == "normalise":
        return _normalising(kernel, array)
    operation, _, part = kernel.name.rpartition("_")
    return loading(array, kernel.name) if part == "load" else storing(array, operation)


def _normalising(kernel: Kernel, array: Array) -> KernelSheet:
    is_strip = any(option.startswith("-DROW_COLS=") for option in kernel.options)
    return normalising(array) if is_strip else normalising_channels(array)


def loading(array: Array, name: str) -> KernelSheet:
    """Return the resources of the kernel that reads A and B."""
    rows, cols = array.tile
    blocks = array.block * (rows + cols) * FLOAT
    places = (array.block + cols) * PLACE
    return KernelSheet(name, 0, blocks + places, 1, array.load_width * FLOAT)


def multiplying(array: Array) -> KernelSheet:
    """Return the resources of the array, with the two channels from which it receives."""
    rows, cols = array.tile
    sums = (rows + 1) * cols * FLOAT
    channels = array.capacity * (array.rows + array.cols) * FLOAT
    return KernelSheet("array", array.rows * array.cols, sums + channels, _interval(array), 0)


def storing(array: Array, operation: str) -> KernelSheet:
    """Return the resources of the kernel that writes C, with its channel."""
    channel = array.capacity * array.cols * FLOAT
    return KernelSheet(f"{operation}_store", FINISHES[operation] * array.cols, channel, 1, 0)


def normalising(array: Array, row_cols: int = ROW_COLS) -> KernelSheet:
    """Return the resources of the kernel over rows, with its strip of rows and its channel."""
    strip = (array.tile[0] * row_cols + 2 * array.tile[0]) * FLOAT
    channel = array.capacity * array.cols * FLOAT
    return KernelSheet("normalise", 1, strip + channel, math.ceil(ADD_CYCLES / array.tile[0]), 0)


def normalising_channels(array: Array) -> KernelSheet:
    """Return the resources of the kernel over channels; it reads stored rows from memory again."""
    sums = (array.tile[0] * array.interleave_cols * array.cols + array.turns + array.cols) * FLOAT
    channel = array.capacity * array.cols * FLOAT
    return KernelSheet("normalise", 1, sums + channel, _interval(array), FLOAT)


def whole(array: Array, operation: str) -> KernelSheet:
    """Return the resources of the single kernel of a product without channels."""
    parts = (loading(array, operation), multiplying(array), storing(array, operation))
    channels = array.capacity * (array.rows + 2 * array.cols) * FLOAT
    step = (array.interleave_rows * array.rows + array.tile[1] + array.cols) * FLOAT
    return KernelSheet(
        operation,
        sum(part.macs for part in parts),
        sum(part.block_ram_nbytes for part in parts) - channels + step,
        max(part.interval for part in parts),
        parts[0].read_nbytes,
    )


def design(array: Array = ARRAY) -> dict[str, str | int | float]:
    """Return the fields of `hetpipe.cost.fpga.ProductDesign` for a product with channels.

    A step of k takes as long as the slower kernel of two: load, which first reads the step's floats
    and then sends them, and array.
    """
    rows, cols = array.tile
    parts = (loading(array, "load"), multiplying(array), storing(array, "matmul"))
    filling = math.ceil(rows / array.load_width) + math.ceil(cols / array.load_width)
    return {
        "name": "kernels/fpga/dataflow.cl",
        "macs": parts[1].macs,
        "further_macs": parts[2].macs,
        "block_ram_nbytes": sum(part.block_ram_nbytes for part in parts),
        "tile_rows": rows,
        "tile_cols": cols,
        "step_cycles": max(array.turns + filling, array.turns * _interval(array)),
        "tile_cycles": rows * array.interleave_cols + array.turns,
    }


def _interval(array: Array) -> int:
    """Return the least interval: the next addition to a sum comes `turns` iterations later."""
    return math.ceil(ADD_CYCLES / array.turns)
