"""A comparison of plans: the plans of all planners, and simple plans that people make by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf
from typing import Any

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable
from hetpipe.errors import HetpipeError, PlanError
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import PLANNERS, finish_plan
from hetpipe.plan.planners.choice import plan as planned
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, single_device_groups
from hetpipe.study.subject import Subject, costs_for, sizes_of

BY_HAND = ("even", "speed-sorted", "data-parallel")
"""Names of the plans that are made by hand; see `by_hand`."""


@dataclass(frozen=True)
class PlannerRow:
    """A planner's plan, or the reason why it has none."""

    planner: str
    plan: Plan | None = None
    costs: CostTable | None = None
    why_not: str = ""
    measured_s: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Plans of one subject on one cluster, the shortest predicted step first."""

    subject: str
    mini_batch: int
    rows: tuple[PlannerRow, ...]
    sum_samples_per_s: float
    """Samples per second of all devices together, if each alone runs the whole model and has enough
    memory."""

    @property
    def best(self) -> Plan:
        """The plan with the shortest predicted step. Raises `PlanError` if there is no plan."""
        for row in self.rows:
            if row.plan is not None:
                return row.plan
        raise PlanError("no planner has a plan: " + "; ".join(row.why_not for row in self.rows))

    def share(self, row: PlannerRow) -> float | None:
        """Return the predicted throughput of a row as a share of `sum_samples_per_s`."""
        if row.plan is None or isinf(self.sum_samples_per_s):
            return None
        return row.plan.samples_per_s / self.sum_samples_per_s if self.sum_samples_per_s else None

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write."""
        return {
            "subject": self.subject,
            "mini_batch": self.mini_batch,
            "sum_samples_per_s": self.sum_samples_per_s,
            "rows": [
                {
                    "planner": row.planner,
                    "why_not": row.why_not,
                    "measured_step_s": row.measured_s,
                    "share_of_sum": self.share(row),
                    "plan": None if row.plan is None else row.plan.to_json(),
                }
                for row in self.rows
            ],
        }


def compare(
    subject: Subject,
    cluster: Cluster,
    options: PlannerOptions | None = None,
    planners: Sequence[str] = (*PLANNERS, *BY_HAND),
    measured: bool = False,
) -> Comparison:
    """Return the plans of these planners, priced by one cost model and one simulator.

    With `measured`, the plans also run, and all devices must be attached. Raises `HetpipeError` if
    costs are missing, or if `measured` is given for a subject that is only a profile.
    """
    options = options or subject.options()
    tables = subject.costs(cluster, sizes_of(options.mini_batch))
    priced = Priced(tables, options)
    rows = [_row(planner, priced, cluster) for planner in planners]
    if measured:
        rows = [_measured(subject, cluster, row) for row in rows]
    rows.sort(key=lambda row: row.plan.step_s if row.plan else float("inf"))
    return Comparison(subject.name, options.mini_batch, tuple(rows), together(tables, cluster))


def by_hand(name: str, priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """Yield the proposals of one way to plan by hand, for all numbers of micro-batches.

    `even` gives devices equal numbers of layers, in the cluster's order. `speed-sorted` does the
    same with the fastest device first. `data-parallel` puts the whole model on each device.
    """
    options, members = priced.options, list(cluster.ids)
    table = priced.tables[max(priced.tables)]
    layers = len(table.layers)
    if name == "speed-sorted":
        members.sort(key=lambda member: sum(one.forward_s for one in table.devices[member].layers))
    stages = min(len(members), layers)
    cuts = tuple(round(layers * stage / stages) for stage in range(1, stages))
    for count in options.counts(priced.tables):
        if name == "data-parallel":
            yield Proposal((), (tuple(members),), name, count)
        else:
            yield Proposal(cuts, single_device_groups(members[:stages]), "1f1b", count)


def together(tables: Mapping[int, CostTable], cluster: Cluster) -> float:
    """Return the samples per second of all devices together, each with the whole model.

    Each device runs micro-batches of its best size. The sum is infinite if a device takes no time.
    """
    total = 0.0
    for member in cluster.ids:
        steps_s = []
        for size, table in tables.items():
            span = member, 0, len(table.layers)
            steps_s.append((table.forward_s(*span) + table.backward_s(*span)) / size)
        total += 1 / min(steps_s) if min(steps_s) else inf
    return total


def _measured(subject: Subject, cluster: Cluster, row: PlannerRow) -> PlannerRow:
    """Return the row with its measured step; a row without a plan stays unchanged."""
    if subject.measure is None:
        raise HetpipeError(f"{subject.name} is a profile, which cannot be run: give the model")
    if row.plan is None or row.costs is None:
        return row
    return replace(row, measured_s=subject.measure(cluster, row.plan, row.costs))


def _row(planner: str, priced: Priced, cluster: Cluster) -> PlannerRow:
    try:
        if planner in BY_HAND:
            quickest = priced.quickest(by_hand(planner, priced, cluster), planner)
            plan = finish_plan(quickest, priced, cluster)
        else:
            plan = planned(priced.tables, cluster, priced.options, planner)
    except HetpipeError as error:
        return PlannerRow(planner, why_not=str(error))
    return PlannerRow(planner, plan, costs_for(priced, plan))
