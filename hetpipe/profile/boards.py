"""Costs for a cluster with boards: models the boards, and measures the attached devices.

A board's worker opens the board's numerics, and says which layers this device can run; it measures
nothing. Attached devices are measured without the boards, which would not disturb them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.links import link_costs
from hetpipe.cost.board import board
from hetpipe.cost.table import CostTable, DeviceCost, LayerCost
from hetpipe.crew.crew import Crew
from hetpipe.profile.described import described_table
from hetpipe.profile.measure import profile
from hetpipe.profile.patterns import Network
from hetpipe.sdk.host.registry import decompositions_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hetpipe.capture.captured import Captured
    from hetpipe.optim.rule import Optimizer
    from hetpipe.profile.measure import Progress
    from hetpipe.profile.rounds import Effort


def modelled_costs(
    captured: Captured, cluster: Cluster, optimizer: Optimizer, sizes: Sequence[int]
) -> dict[int, CostTable]:
    """Return, by micro-batch size, tables with the costs of boards and of all described links.

    Passes are priced in the dtype in which they compute. Raises `CostError` for a board without a
    peak for that dtype, and `ClusterError` for a link without a description.
    """
    boards = {member.id: board(member.board) for member in cluster.described}
    links, dtype = link_costs(cluster), captured.precision.compute or "float32"
    return {
        size: described_table(captured, boards, links, size, optimizer, dtype) for size in sizes
    }


def attached_cluster(cluster: Cluster) -> Cluster | None:
    """Return the cluster without its boards; None if it has only boards."""
    members = tuple(member for member in cluster.members if not member.board)
    if not members:
        return None
    ids = {member.id for member in members}
    links = {pair: link for pair, link in cluster.links.items() if pair <= ids}
    return replace(cluster, members=members, links=links)


def merge_tables(measured: CostTable, modelled: CostTable) -> CostTable:
    """Merge the devices and links of both tables; a link in both tables keeps its measured cost."""
    return replace(
        measured,
        devices={**modelled.devices, **measured.devices},
        links={**modelled.links, **measured.links},
    )


def board_costs(
    captured: Captured,
    crew: Crew,
    optimizer: Optimizer,
    samples: Sequence[int],
    progress: Progress,
    report: Callable[[Effort], None],
) -> dict[int, CostTable]:
    """Return a table per micro-batch size for a crew with boards.

    A board cannot run a layer that its numerics cannot run. Attached members are profiled on
    separate workers, while the workers of the crew are idle. Raises `HetpipeError` as
    `modelled_costs` and `profile` do.
    """
    progress("counting operations for boards", 0, 1)
    tables = modelled_costs(captured, crew.cluster, optimizer, samples)
    reasons = _reasons(captured, crew, optimizer, min(samples))
    tables = {size: _refusing(table, reasons) for size, table in tables.items()}
    progress("counting operations for boards", 1, 1)
    devices = attached_cluster(crew.cluster)
    if devices is None:
        return tables
    with Crew.start(devices) as measuring:
        measured = profile(captured, measuring, optimizer, samples, progress, report)
    return {size: merge_tables(measured[size], table) for size, table in tables.items()}


def _reasons(
    captured: Captured, crew: Crew, optimizer: Optimizer, size: int
) -> dict[str, dict[int, str]]:
    """Return, by board and layer number, why the board's numerics cannot run the layer."""
    members: dict[str, list[str]] = {}
    for each in crew.cluster.described:
        members.setdefault(crew.infos[each.id].backend, []).append(each.id)
    count = len(captured.layer_graph(size).layers)
    reasons: dict[str, dict[int, str]] = {}
    for backend, own in members.items():
        tables = [decompositions_of(backend)] * count
        stages = captured.stage_graphs(range(1, count), tables, [size], optimizer, extras=())
        network = Network.of(stages)
        answers = crew.call(own, "hetpipe.worker.divided:find_refusals", network.patterns)
        for member, refused in zip(own, answers, strict=True):
            reasons[member] = {
                layer: f"its numerics, {refused[pattern]}"
                for layer, pattern in enumerate(network.layers)
                if pattern in refused
            }
    return reasons


def _refusing(table: CostTable, reasons: Mapping[str, Mapping[int, str]]) -> CostTable:
    """Return the table with infinite times for layers that the numerics of a board cannot run."""

    def able(cost: DeviceCost, own: Mapping[int, str]) -> DeviceCost:
        endless = (math.inf, math.inf, math.inf)
        layers = enumerate(cost.layers)
        return replace(
            cost, layers=tuple(LayerCost(*endless, own[n]) if n in own else c for n, c in layers)
        )

    devices = {id: able(cost, reasons.get(id, {})) for id, cost in table.devices.items()}
    return replace(table, devices=devices)
