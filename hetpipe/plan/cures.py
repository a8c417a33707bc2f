"""Cures: tells why no plan fits the memory of a cluster's devices, and names the cheapest cure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetpipe.cost.between import at_size
from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.errors import CostError
from hetpipe.plan.groups import group_matrix
from hetpipe.plan.limits import MISSING, why_unable
from hetpipe.plan.partition import exact
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, in_flight, single_device_groups
from hetpipe.plan.search import fit_cuts
from hetpipe.schedule.rule import rule_of
from hetpipe.words import words

SCHEDULE = "1f1b"
FREE = LinkCost(0.0, float("inf"))


def why_not(priced: Priced, members: Sequence[str]) -> str:
    """Return why no plan fits: the stage that lacks memory, the bytes that it lacks, and a cure."""
    schedules = priced.options.schedules
    if schedules and all(rule_of(name).several_stages for name in schedules):
        return (
            f"the planner gives each device one stage, but under {words(schedules)} a device has "
            "several: name another schedule or another planner"
        )
    schedule = _schedule(priced.options)
    counts = priced.options.counts(priced.tables)
    asked = priced.options.microbatches
    if not rule_of(schedule).flushes and 1 not in counts and len(asked) != 1:
        whole = priced.options.mini_batch
        return (
            f"{schedule} does not cut a mini-batch, but one of {whole} samples is to be cut "
            f"into {words(counts)} micro-batches: allow 1, with costs for {whole} samples"
        )
    count = counts[-1] if rule_of(schedule).flushes or len(asked) == 1 else 1
    bare = _bare(priced, members, schedule, count)
    costs, versions = priced.costs(bare), priced.versions(bare)
    matrices = [
        group_matrix(
            costs, bare.groups, n, bare.in_flight[n], "sum", count, versions[n], bounded=False
        )
        for n in range(len(bare.groups))
    ]
    cuts = exact(matrices)
    if cuts is None:
        whys = (why_unable(costs.table, member, 0, costs.count) for member in members)
        return "no cuts give every layer to a device that can run it: " + next(filter(None, whys))
    reason = priced.why_not(replace(bare, cuts=cuts))
    if reason is None:
        return (
            f"{schedule} with one device for each stage fits, but this planner proposes only other "
            "plans: name another planner, or let this one choose the schedule"
        )
    if MISSING not in reason:
        return reason
    for remedy, trial, names in _remedies(priced, members, schedule, count):
        recompute = remedy.startswith("recompute")
        counted = max(trial.options.microbatches)
        if fit_cuts(trial, _bare(trial, names, schedule, counted, recompute)):
            return f"{reason}; it fits with {remedy}"
    return f"{reason}; no cure alone is enough: take devices with more memory, or more devices"


def _schedule(options: PlannerOptions) -> str:
    """Return the first available schedule that gives each device one stage."""
    straight = [name for name in options.schedules if not rule_of(name).several_stages]
    return straight[0] if straight else SCHEDULE


def _bare(
    priced: Priced, members: Sequence[str], schedule: str, count: int, recompute: bool = False
) -> Proposal:
    """Return a proposal without cuts, with a stage on each device."""
    layers = len(next(iter(priced.tables.values())).layers)
    groups = single_device_groups(members[:layers] if rule_of(schedule).averages else members[:1])
    depths = in_flight(schedule, len(groups), count)
    return Proposal((), groups, schedule, count, depths, recompute)


def _remedies(
    priced: Priced, members: Sequence[str], schedule: str, count: int
) -> Iterator[tuple[str, Priced, Sequence[str]]]:
    """Yield remedies, the cheapest first: a remedy's name, the prices with it, and the devices."""
    options, tables = priced.options, dict(priced.tables)
    now = replace(options, microbatches=(count,))
    yield "recompute", Priced(tables, now), members
    streams = not rule_of(schedule).flushes
    if streams and options.weights in ("auto", "stash", "vertical-sync"):
        yield "weights='pipeoptim'", Priced(tables, replace(now, weights="pipeoptim")), members
    by = ", which the planners auto and bapipe propose" if streams else ""
    while count < options.mini_batch:
        count = min(2 * count, options.mini_batch)
        size = options.size(count)
        try:
            smaller = {**tables, size: at_size(tables, size)}
        except CostError:
            break
        yield f"micro-batches of {size}{by}", Priced(smaller, _with(options, count)), members
    largest = max(members, key=lambda member: tables[max(tables)].devices[member].memory_nbytes)
    another = {size: _another(table, largest) for size, table in tables.items()}
    yield f"one more device like {largest}", Priced(another, now), [*members, f"{largest} again"]


def _with(options: PlannerOptions, count: int) -> PlannerOptions:
    return replace(options, microbatches=(count,))


def _another(table: CostTable, member: str) -> CostTable:
    """Return the table with a copy of a member; the copy's links cost nothing."""
    new = f"{member} again"
    links = {pair: FREE for other in table.devices for pair in ((new, other), (other, new))}
    devices = {**table.devices, new: replace(table.devices[member], memory_domain=new)}
    return replace(table, devices=devices, links={**table.links, **links})
