"""Modelled costs of a captured model on boards.

As for a profile, the network is cut after every layer, and each pattern of layers is counted only
once. No device is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from hetpipe.cost import fpga, gpu
from hetpipe.cost.board import Board
from hetpipe.cost.design import ProductDesign
from hetpipe.cost.table import CostTable, DeviceCost, LayerCost, LinkCost, TiedBytes
from hetpipe.cost.work import Kernel, ModelWork
from hetpipe.profile.count import layer_work
from hetpipe.profile.measure import layer_bytes, tied_bytes
from hetpipe.profile.patterns import Network

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.optim.rule import Optimizer


def described_table(
    captured: Captured,
    boards: Mapping[str, Board],
    links: Mapping[tuple[str, str], LinkCost],
    samples: int,
    optimizer: Optimizer,
    dtype: str = "float32",
    designs: Mapping[str, ProductDesign] | None = None,
) -> CostTable:
    """Return the costs of all layers on each member's board, for micro-batches of `samples`.

    `designs` maps the id of an FPGA board to the board's design for matrix products. Raises
    `CostError` for a board without a peak for `dtype`, and `CaptureError` as a capture does.
    """
    count = len(captured.layer_graph(samples).layers)
    stages = captured.stage_graphs(range(1, count), [{}] * count, [samples], optimizer, extras=())
    network = Network.of(stages)
    work = [layer_work(stage, samples) for stage in network.patterns]
    layers = tuple(work[pattern] for pattern in network.layers)
    model = ModelWork(captured.name, samples, layers, layer_bytes(captured, stages, samples))
    tied = tied_bytes(captured, stages, samples)
    table = table_of(model, boards, links, dtype, tied=tied, designs=designs or {})
    return replace(table, trains=captured.trains)


def table_of(
    work: ModelWork,
    boards: Mapping[str, Board],
    links: Mapping[tuple[str, str], LinkCost],
    dtype: str = "float32",
    tied: tuple[TiedBytes, ...] = (),
    designs: Mapping[str, ProductDesign] = MappingProxyType({}),
) -> CostTable:
    """Return the costs of `work` on each member's board."""
    by_id = {board.id: board for board in boards.values()}

    @cache
    def costs(id: str) -> tuple[LayerCost, ...]:
        board = by_id[id]
        return tuple(
            LayerCost(
                _pass_s(board, each.forward, dtype, designs.get(id)),
                _pass_s(board, each.backward, dtype, designs.get(id)),
                _pass_s(board, each.update, dtype, designs.get(id)),
            )
            for each in work.layers
        )

    devices = {
        member: DeviceCost(
            costs(board.id), board.launch_s, board.memory_nbytes, member, board.execution,
            "modelled",
        )
        for member, board in boards.items()
    }  # fmt: skip
    return CostTable(work.model, work.samples, work.nbytes, devices, dict(links), tied=tied)


def _pass_s(
    board: Board, kernels: tuple[Kernel, ...], dtype: str, design: ProductDesign | None
) -> float:
    if board.fabric is not None:
        return fpga.kernels_s(board, kernels, dtype, design)
    return board.launch_s + gpu.kernels_s(board, kernels, dtype=dtype)
