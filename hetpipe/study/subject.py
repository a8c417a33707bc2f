"""Subjects of studies: models with their costs on any cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.links import link_costs
from hetpipe.cost.board import Board, board
from hetpipe.cost.pipedream_profile import ChainCosts, read_profile
from hetpipe.cost.placed import scale_to_boards
from hetpipe.cost.table import CostTable
from hetpipe.errors import ClusterError, CostError, PlanError
from hetpipe.plan.intra import split_table
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import finish_plan
from hetpipe.plan.planners.choice import plan as planned
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.schedule.rule import GPIPE
from hetpipe.words import word, words

REFERENCE = "v100-pcie-16"
"""The board on which PipeDream's and DAPPLE's profiles were measured."""

Costs = Callable[[Cluster, Sequence[int]], Mapping[int, CostTable]]
"""Returns the costs on a cluster, by size of micro-batches."""
Measure = Callable[[Cluster, Plan, CostTable], float]
"""Runs a plan on a cluster of attached devices, and returns the measured seconds of a step."""


@dataclass(frozen=True)
class Subject:
    """A model with a mini-batch, and a function that returns the model's costs on a cluster."""

    name: str
    mini_batch: int
    costs: Costs
    measure: Measure | None = None
    """Runs a plan and measures the step; None if only costs are known."""
    channels: Callable[[], Mapping[str, int]] = dict
    """Returns the output channels of the layers that can be split; none for a profile."""
    profiled_on: str = ""
    """The board of a profile, from which times are scaled to other boards."""
    schedules: tuple[str, ...] = ()
    """The only schedules that the model's loss allows; empty: all."""

    def options(self, **chosen: Any) -> PlannerOptions:
        """Return the options of a planner for this subject."""
        chosen["schedules"] = chosen.get("schedules") or self.schedules
        return PlannerOptions(self.mini_batch, channels=self.channels(), **chosen)


def of_profile(path: Path, samples: int, mini_batch: int, reference: str = REFERENCE) -> Subject:
    """Return the subject of a profile in PipeDream's format.

    The profile was measured at micro-batches of `samples` on board `reference`; for other boards
    and sizes its times are scaled (`hetpipe.cost.placed`). Raises `CostError`.
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
    """Return the subject of a chain of layers.

    The chain was measured at micro-batches of `samples` on board `reference`. Optimizer state is
    `state_copies` times the parameters: 1 for momentum, 2 for Adam.
    """
    profiled = board(reference), samples

    def costs(cluster: Cluster, sizes: Sequence[int]) -> dict[int, CostTable]:
        members, links = described(cluster), link_costs(cluster)
        return {
            size: scale_to_boards(name, chain, profiled, members, links, size, state_copies)
            for size in sizes
        }

    return Subject(name, mini_batch, costs, profiled_on=reference)


def of_table(table: CostTable, mini_batch: int) -> Subject:
    """Return a subject with the costs of a table, for clusters of the table's devices."""

    def costs(cluster: Cluster, sizes: Sequence[int]) -> dict[int, CostTable]:
        for member in cluster.ids:
            if member not in table.devices:
                there = words(table.devices)
                raise CostError(f"no costs for {word(member)}; the table has {there}")
        return {table.samples: table}

    schedules = (GPIPE.name,) if table.whole_loss else ()
    return Subject(table.model, mini_batch, costs, schedules=schedules)


def described(cluster: Cluster) -> dict[str, Board]:
    """Return the board of every member. Raises `ClusterError` for an attached device."""
    for member in cluster.members:
        if not member.board:
            raise ClusterError(
                f"{member.id} is {member.device}, an attached device, but these costs are only of "
                "boards: give this member a board, or profile the model on the device"
            )
    return {member.id: board(member.board) for member in cluster.members}


@cache
def sizes_of(mini_batch: int) -> tuple[int, ...]:
    """Return the mini-batch divided by 1, 2, 4, ... and rounded up, down to 1 sample; ascending."""
    return tuple(sorted({-(-mini_batch // 2**k) for k in range(mini_batch.bit_length() + 1)}))


def plan(
    subject: Subject,
    cluster: Cluster,
    options: PlannerOptions | None = None,
    planner: str = "auto",
    known: Plan | None = None,
) -> tuple[Plan, CostTable]:
    """Return a planner's plan, and the costs at its micro-batches. Raises `HetpipeError`.

    A `known` plan is returned instead if the cluster has its devices and it is faster there.
    """
    options = options or subject.options()
    tables = subject.costs(cluster, sizes_of(options.mini_batch))
    chosen, priced = planned(tables, cluster, options, planner), Priced(tables, options)
    if known is not None and {*known.all_devices} <= {*cluster.ids}:
        with suppress(PlanError):  # it need not fit there
            again = priced.plan_again(known)
            if again.step_s < chosen.step_s:
                chosen = finish_plan(again, priced, cluster)
    return chosen, costs_for(priced, chosen)


def costs_for(priced: Priced, plan: Plan) -> CostTable:
    """Return the costs after a plan's splits, at the plan's micro-batch size or the nearest one."""
    size = priced.options.size(plan.microbatches)
    least, most = min(priced.tables), max(priced.tables)
    table = priced.table(min(max(size, least), most))
    for split in plan.splits:
        table = split_table(table, split, priced.options.channels)
    return table
