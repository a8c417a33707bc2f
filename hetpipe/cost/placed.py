"""Placed profiles: scale a published profile from its device to any board."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from hetpipe.cost.board import Board
from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost

UPDATE_ACCESSES = 4
"""How often an update moves the bytes of the parameters: weights, gradients and state."""


def scale_to_boards(
    name: str,
    chain: ChainCosts,
    profiled: tuple[Board, int],
    members: Mapping[str, Board],
    links: Mapping[tuple[str, str], LinkCost],
    samples: int,
    state_copies: int = 1,
) -> CostTable:
    """Return the modelled costs of a chain at micro-batches of `samples`.

    `profiled` is the board on which the chain was measured, and the number of samples in that
    measurement. Times and activations are proportional to the samples. Times are also multiplied by
    the profiled board's sustained rate over the sustained rate of the member's board, and each pass
    of a layer takes one launch more. Optimizer state is `state_copies` times the parameters: 1 for
    momentum, 2 for Adam.
    """
    board, measured = profiled
    share = samples / measured
    layers = tuple(
        LayerBytes(
            layer,
            params_nbytes,
            state_copies * params_nbytes,
            round(share * activation_nbytes),
            round(share * cut_nbytes),
        )
        for layer, params_nbytes, activation_nbytes, cut_nbytes in zip(
            chain.names, chain.params_nbytes, chain.activation_nbytes, chain.cut_nbytes, strict=True
        )
    )

    @cache
    def costs(id: str) -> tuple[LayerCost, ...]:
        there = boards[id]
        slower = share * sustained_flops(board) / sustained_flops(there)
        return tuple(
            LayerCost(
                there.launch_s + slower * forward_s,
                there.launch_s + slower * backward_s,
                UPDATE_ACCESSES * params_nbytes / there.memory_Bps,
            )
            for forward_s, backward_s, params_nbytes in zip(
                chain.forward_s, chain.backward_s, chain.params_nbytes, strict=True
            )
        )

    boards = {there.id: there for there in members.values()}
    devices = {
        member: DeviceCost(
            costs(there.id),
            there.launch_s,
            there.memory_nbytes,
            member,
            there.execution,
            "modelled",
        )
        for member, there in members.items()
    }
    return CostTable(name, samples, layers, devices, links)


def sustained_flops(board: Board) -> float:
    """Return a board's float32 operations per second, by which times are scaled to other boards: a
    processor's peak, or the throughput of an FPGA's DSPs (`hetpipe.cost.fpga`)."""
    fabric = board.fabric
    if fabric is None:
        return board.peak_flops["float32"]
    working = fabric.dsp * fabric.usable * fabric.efficiency
    return 2 * fabric.clock_Hz * working / fabric.dsp_per_mac["float32"]
