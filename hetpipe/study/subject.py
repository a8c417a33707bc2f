"""Subjects: a model as a study sees it, which has costs on any cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.costs import link_costs
from hetpipe.cost.board import Board, board
from hetpipe.cost.pipedream_profile import ChainCosts, read_profile
from hetpipe.cost.placed import scale_to_boards
from hetpipe.cost.table import CostTable
from hetpipe.errors import ClusterError, CostError
from hetpipe.plan.plan import Plan
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.words import word, words

REFERENCE = "v100-pcie-16"
"""The board on which PipeDream's and DAPPLE's profiles were measured."""

Costs = Callable[[Cluster, Sequence[int]], Mapping[int, CostTable]]
"""A cluster and sizes of micro-batches -> the costs at each."""
Measure = Callable[[Cluster, Plan, CostTable], float]
"""Attached devices, a plan and its costs -> the seconds of a step, measured."""


@dataclass(frozen=True)
class Subject:
    """A model with a mini-batch, and its costs on a cluster at sizes of micro-batches."""

    name: str
    mini_batch: int
    costs: Costs
    measure: Measure | None = None
    """Runs a plan; None where nothing but costs is known."""
    channels: Callable[[], Mapping[str, int]] = dict
    """Output channels of the layers that can be split between two stages; none of a profile."""

    def options(self, **chosen: Any) -> PlannerOptions:
        """What a planner may choose for it."""
        return PlannerOptions(self.mini_batch, channels=self.channels(), **chosen)


def of_profile(path: Path, samples: int, mini_batch: int, reference: str = REFERENCE) -> Subject:
    """A published profile, measured at micro-batches of `samples` on the board `reference`.

    On other boards its times are scaled (`hetpipe.cost.placed`). Raises `CostError`.
    """
    return of_chain(
        path.stem, read_profile(path).without_inputs().chain(), samples, mini_batch, reference
    )


def of_chain(
    name: str,
    chain: ChainCosts,
    samples: int,
    mini_batch: int,
    reference: str = REFERENCE,
    state_copies: int = 1,
) -> Subject:
    """A chain of layers, measured at micro-batches of `samples` on the board `reference`.

    Optimizer state is `state_copies` times the parameters: 1 for momentum, 2 for Adam.
    """
    profiled = board(reference), samples

    def costs(cluster: Cluster, sizes: Sequence[int]) -> dict[int, CostTable]:
        members, links = described(cluster), link_costs(cluster)
        return {
            size: scale_to_boards(name, chain, profiled, members, links, size, state_copies)
            for size in sizes
        }

    return Subject(name, mini_batch, costs)


def of_table(table: CostTable, mini_batch: int) -> Subject:
    """Costs as they are, of devices that a cluster names."""

    def costs(cluster: Cluster, sizes: Sequence[int]) -> dict[int, CostTable]:
        for member in cluster.ids:
            if member not in table.devices:
                there = words(table.devices)
                raise CostError(f"no costs for {word(member)}; the table has {there}")
        return {table.samples: table}

    return Subject(table.model, mini_batch, costs)


def described(cluster: Cluster) -> dict[str, Board]:
    """The board of every member. Raises `ClusterError` for one that is attached."""
    for member in cluster.members:
        if not member.board:
            raise ClusterError(
                f"{member.id} is {member.device}, an attached device, and these costs are of "
                "boards: give it a board, or profile the model on it"
            )
    return {member.id: board(member.board) for member in cluster.members}


@cache
def sizes_of(mini_batch: int) -> tuple[int, ...]:
    """Sizes of micro-batches that divide a mini-batch by powers of two, down to one sample."""
    return tuple(sorted({-(-mini_batch // 2**k) for k in range(mini_batch.bit_length() + 1)}))
