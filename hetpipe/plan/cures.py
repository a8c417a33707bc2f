"""The reason why no plan fits a cluster's memory, and the cheapest cure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetpipe.cost.between import at_size
from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.errors import CostError
from hetpipe.plan.exact import exact
from hetpipe.plan.groups import group_matrix
from hetpipe.plan.proposal import PlannerOptions, Priced, Proposal, grouped, in_flight
from hetpipe.plan.search import fitting

SCHEDULE = "1f1b"
FREE = LinkCost(0.0, float("inf"))


def why_not(priced: Priced, members: Sequence[str]) -> str:
    """The stage of the best partition that lacks memory, how many bytes, and a cure."""
    count = priced.options.counts(priced.tables)[-1]
    bare = _bare(priced, members, count)
    costs = priced.costs(bare)
    matrices = [
        group_matrix(costs, bare.groups, n, bare.in_flight[n], "sum", count, bounded=False)
        for n in range(len(bare.groups))
    ]
    cuts = exact(matrices)
    if cuts is None:
        return "in this order of devices some layer finds none that can run it"
    reason = priced.why_not(replace(bare, cuts=cuts))
    if reason is None:
        return "the planner proposes nothing that these devices can run"
    for remedy, trial, names in _remedies(priced, members, count):
        recompute = remedy.startswith("recompute")
        if fitting(trial, _bare(trial, names, max(trial.options.microbatches), recompute)):
            return f"{reason}; it fits with {remedy}"
    return f"{reason}; neither recompute nor one more device is enough: take larger ones, or more"


def _bare(priced: Priced, members: Sequence[str], count: int, recompute: bool = False) -> Proposal:
    """A stage on each device, without cuts."""
    layers = len(next(iter(priced.tables.values())).layers)
    groups = grouped(members[:layers])
    depths = in_flight(SCHEDULE, len(groups), count)
    return Proposal((), groups, SCHEDULE, count, depths, recompute)


def _remedies(
    priced: Priced, members: Sequence[str], count: int
) -> Iterator[tuple[str, Priced, Sequence[str]]]:
    """Remedies from the cheapest on: their name, the costs with them, and the devices."""
    options, tables = priced.options, dict(priced.tables)
    now = replace(options, microbatches=(count,))
    yield "recompute", Priced(tables, now), members
    while count < options.mini_batch:
        count = min(2 * count, options.mini_batch)
        size = options.size(count)
        try:
            smaller = {**tables, size: at_size(tables, size)}
        except CostError:
            break
        yield f"micro-batches of {size}", Priced(smaller, _with(options, count)), members
    largest = max(members, key=lambda member: tables[max(tables)].devices[member].memory_nbytes)
    another = {size: _another(table, largest) for size, table in tables.items()}
    yield f"one more device like {largest}", Priced(another, now), [*members, f"{largest} again"]


def _with(options: PlannerOptions, count: int) -> PlannerOptions:
    return replace(options, microbatches=(count,))


def _another(table: CostTable, member: str) -> CostTable:
    """The table with a second device like a member, whose links cost nothing."""
    new = f"{member} again"
    links = {pair: FREE for other in table.devices for pair in ((new, other), (other, new))}
    devices = {**table.devices, new: replace(table.devices[member], memory_domain=new)}
    return replace(table, devices=devices, links={**table.links, **links})
