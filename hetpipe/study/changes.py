"""The step time after a change of a cluster: one device more or fewer, another device or link."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.parts import without
from hetpipe.cluster.units import parse_link
from hetpipe.cost.board import board as find_board
from hetpipe.errors import ClusterError, HetpipeError
from hetpipe.plan.plan import Plan
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.study.expense import UNSTATED, Expense, expense_of
from hetpipe.study.subject import Subject
from hetpipe.study.subject import plan as planned

FORMS = (
    "-ID (without a device), +BOARD or +BOARD@SERVER (one more), ID=BOARD (another in its place), "
    'ID~ID=LINK or network=LINK (LINK is "10 Gb/s, 5 us")'
)


@dataclass(frozen=True)
class Alternative:
    """A change of a cluster, and the plan after the change, or the reason why there is none."""

    change: str  # empty: the unchanged cluster
    plan: Plan | None
    why_not: str = ""
    expense: Expense = UNSTATED  # of the cluster after the change

    @property
    def samples_per_J(self) -> float | None:
        """Samples per second and watt; None if the power is unknown."""
        return self._samples_per_s_per(self.expense.power_w)

    @property
    def samples_per_s_per_price(self) -> float | None:
        """Samples per second and unit of the currency; None if the price is unknown."""
        return self._samples_per_s_per(self.expense.price)

    def _samples_per_s_per(self, total: float | None) -> float | None:
        return None if self.plan is None or total is None else self.plan.samples_per_s / total


@dataclass(frozen=True)
class WhatIf:
    """The plan of the unchanged cluster, and the plan after each single change."""

    subject: str
    now: Alternative
    changes: tuple[Alternative, ...]

    def factor(self, changed: Alternative) -> float | None:
        """Return the step time after a change, divided by the time before; below 1 is faster."""
        if changed.plan is None or self.now.plan is None or not self.now.plan.step_s:
            return None
        return changed.plan.step_s / self.now.plan.step_s

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write."""
        return {
            "subject": self.subject,
            "rows": [
                {
                    "change": row.change,
                    "step_s": None if row.plan is None else row.plan.step_s,
                    "factor": self.factor(row),
                    "why_not": row.why_not,
                    "power_w": row.expense.power_w,
                    "samples_per_J": row.samples_per_J,
                    "price": row.expense.price,
                    "currency": row.expense.currency,
                    "samples_per_s_per_price": row.samples_per_s_per_price,
                    "plan": None if row.plan is None else row.plan.to_json(),
                }
                for row in (self.now, *self.changes)
            ],
        }


def whatif(
    subject: Subject,
    cluster: Cluster,
    changes: Sequence[str],
    options: PlannerOptions | None = None,
    planner: str = "auto",
) -> WhatIf:
    """Plan the unchanged cluster, and the cluster after each single change.

    Raises `HetpipeError` for a change that has none of the `FORMS`, or an unknown name.
    """
    clusters = [(change, changed(cluster, change)) for change in changes]

    def alternative(change: str, there: Cluster, known: Plan | None = None) -> Alternative:
        try:
            plan, _ = planned(subject, there, options, planner, known)
            return Alternative(change, plan, expense=expense_of(there))
        except HetpipeError as error:
            return Alternative(change, None, str(error))

    now = alternative("", cluster)
    known = now.plan if planner == "auto" else None  # another planner shows its own plans
    return WhatIf(subject.name, now, tuple(alternative(*each, known) for each in clusters))


def changed(cluster: Cluster, change: str) -> Cluster:
    """Return the cluster after a change. Raises `ClusterError`, and `CostError` for a board."""
    text = change.strip()
    if text.startswith("-"):
        return _without(cluster, text[1:].strip())
    if text.startswith("+"):
        board, _, server = (part.strip() for part in text[1:].partition("@"))
        return _with(cluster, board, server)
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name or not value:
        raise ClusterError(f"change {change!r}: write {FORMS}")
    if name == "network":
        return _with_network(cluster, value)
    if "~" in name:
        ends = [cluster.member(end.strip()).id for end in name.split("~")]
        return replace(cluster, links={**cluster.links, frozenset(ends): parse_link(value)})
    return _replaced(cluster, name, value)


def _without(cluster: Cluster, gone: str) -> Cluster:
    """Return the cluster without a member and its links."""
    return without(cluster, [cluster.member(gone).id])


def _with(cluster: Cluster, board: str, server: str) -> Cluster:
    """Return the cluster with one more board, the last member, in `server` if it is not empty."""
    taken = [re.fullmatch(rf"{re.escape(board)}\.(\d+)", id) for id in cluster.ids]
    number = max((int(match[1]) for match in taken if match), default=-1) + 1
    new = Member(f"{board}.{number}", "", board=find_board(board).id, server=server)
    return replace(cluster, members=(*cluster.members, new))


def _replaced(cluster: Cluster, name: str, board: str) -> Cluster:
    """Return the cluster with a board in the place of a member; the board has the member's id."""
    old = cluster.member(name)
    new = replace(old, device="", board=find_board(board).id)
    members = tuple(new if member is old else member for member in cluster.members)
    return replace(cluster, members=members)


def _with_network(cluster: Cluster, text: str) -> Cluster:
    """Return the cluster with another speed of the network between servers, and the same shape."""
    if cluster.network is None:
        raise ClusterError("the cluster has no network between servers; change a link, as a~b=LINK")
    link = parse_link(text)
    network = replace(cluster.network, bandwidth_Bps=link.bandwidth_Bps, latency_s=link.latency_s)
    return replace(cluster, network=network)
