"""Modelled seconds on FPGA boards, similar to FPDeep (BaPipe's section 4.3).

The DSPs are divided among the layers and passes of a stage in proportion to their operations. So
the seconds of a stage are its operations over the throughput of all DSPs,

    seconds = operations / (2 f DSP u e / d)

with the clock f, d DSPs for a multiply-add, the share u of DSPs that a design can use, and the
design's efficiency e. The product u e is calibrated by measured designs. A layer's bytes that do
not fit on the chip go to and from the board's memory, which may take longer than the operations.

`kernels_s` gives each layer the whole chip, so the seconds of layers can be added. In `stage_s` the
layers of a stage share the chip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetpipe.cost.board import Board, Fabric
from hetpipe.cost.design import ProductDesign
from hetpipe.cost.work import Kernel
from hetpipe.errors import CostError

ERROR = 0.24
"""The median relative error for measured matrix products on three boards, after a calibration on
two other boards; other pairs of boards give 0.17 to 0.65."""
MEMORY_SHARE = 0.8  # the share of the memory's bandwidth that long bursts reach (an estimate)


@dataclass(frozen=True)
class Rates:
    """The resources of a board that the layers of a stage share."""

    operations_per_s: float
    memory_Bps: float
    on_chip_nbytes: float


@dataclass(frozen=True)
class LayerShape:
    """A layer with weights: the operations of its products for one micro-batch, and its bytes.

    `features_nbytes` are the bytes of the layer's input for one micro-batch; the backward needs the
    input again.
    """

    forward_operations: float
    backward_operations: float
    params_nbytes: float
    features_nbytes: float


@dataclass(frozen=True)
class Kept:
    """Data that the chip may keep: their bytes, and the bytes that cross to and from the memory per
    micro-batch if the memory keeps the data."""

    nbytes: float
    traffic_nbytes: float


def throughput(fabric: Fabric, dtype: str = "float32", working: float | None = None) -> float:
    """Return the operations per second of all DSPs. `working` is the product u e, by default
    `usable` times `efficiency`. Raises `CostError` for a dtype without a number of DSPs in the
    board's file."""
    if dtype not in fabric.dsp_per_mac:
        there = ", ".join(fabric.dsp_per_mac)
        raise CostError(f"no DSPs are given for {dtype}; the board has numbers for {there}")
    share = fabric.usable * fabric.efficiency if working is None else working
    return 2 * fabric.clock_Hz * fabric.dsp * share / fabric.dsp_per_mac[dtype]


def kernels_s(
    board: Board,
    kernels: Iterable[Kernel],
    dtype: str = "float32",
    design: ProductDesign | None = None,
) -> float:
    """Return the seconds of a layer's kernels in one pass.

    With a `design`, the board has as many of its arrays as fit, and matrix products take the cycles
    of these arrays. The seconds of all other kernels are their operations over the throughput of
    the DSPs. Raises `CostError` for a board without a fabric, or without room for the design.
    """
    if board.fabric is None:
        raise CostError(f"{board.id} has no fabric; it is no FPGA")
    each = list(kernels)
    products = [] if design is None else [kernel for kernel in each if kernel.products]
    others = each if design is None else [kernel for kernel in each if not kernel.products]
    computing_s = sum(kernel.operations for kernel in others) / throughput(board.fabric, dtype)
    if design is not None and products:
        arrays = design.arrays(board, dtype)
        shapes = [shape for kernel in products for shape in kernel.products]
        cycles = sum(design.cycles(shape, arrays) for shape in shapes)
        computing_s += cycles / board.fabric.clock_Hz
    beyond = max(0, sum(kernel.nbytes for kernel in each) - board.fabric.on_chip_nbytes)
    return board.launch_s + max(computing_s, beyond / (board.memory_Bps * MEMORY_SHARE))


def stage_s(
    layers: Sequence[LayerShape], rates: Rates, in_flight: int, weights_on_chip: bool = True
) -> tuple[float, float]:
    """Return the seconds of the forward and the backward of a stage, for one micro-batch.

    A layer takes as long as its operations, or as its bytes to and from the memory if that is
    longer. Both passes read the weights; the backward reads and writes their gradients; the forward
    writes features, and the backward reads them. Features are kept for `in_flight` micro-batches.
    Without `weights_on_chip` the memory keeps all weights and gradients.
    """
    weights = [Kept(layer.params_nbytes, 2 * layer.params_nbytes) for layer in layers]
    features = [
        Kept(in_flight * layer.features_nbytes, 2 * layer.features_nbytes) for layer in layers
    ]
    everything = [*weights, *weights, *features] if weights_on_chip else features
    crossing = crossing_nbytes(everything, rates.on_chip_nbytes)
    if not weights_on_chip:
        crossing = [kept.traffic_nbytes for kept in weights] * 2 + crossing
    count = len(layers)
    forward_s = backward_s = 0.0
    for n, layer in enumerate(layers):
        weights_nbytes, gradients_nbytes, features_nbytes = crossing[n::count]
        each_nbytes = (weights_nbytes + features_nbytes) / 2
        forward_s += max(
            layer.forward_operations / rates.operations_per_s, each_nbytes / rates.memory_Bps
        )
        backward_s += max(
            layer.backward_operations / rates.operations_per_s,
            (each_nbytes + gradients_nbytes) / rates.memory_Bps,
        )
    return forward_s, backward_s


def crossing_nbytes(everything: Sequence[Kept], on_chip_nbytes: float) -> list[float]:
    """Return each entry's bytes to and from the memory in a micro-batch; their sum is minimal.

    The chip keeps the entries that save most traffic per byte, and a part of the next entry if
    bytes remain free.
    """
    crossing = [kept.traffic_nbytes for kept in everything]
    free_nbytes = on_chip_nbytes
    by_saving = sorted(
        (n for n, kept in enumerate(everything) if kept.nbytes > 0),
        key=lambda n: -everything[n].traffic_nbytes / everything[n].nbytes,
    )
    for n in by_saving:
        inside = min(everything[n].nbytes, free_nbytes)
        free_nbytes -= inside
        crossing[n] *= 1 - inside / everything[n].nbytes
    return crossing
