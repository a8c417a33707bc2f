"""Advice: changes of a plan that save time, found by pricing the plans near it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetpipe.cost.table import CostTable
from hetpipe.errors import HetpipeError
from hetpipe.plan.plan import Plan
from hetpipe.plan.priced import Priced
from hetpipe.plan.pricing import predicted_step_s
from hetpipe.plan.proposal import (
    Groups,
    PlannerOptions,
    Proposal,
    Tables,
    nearest_table,
    proposal_of,
)
from hetpipe.schedule.rule import rule_of, schedule_names
from hetpipe.words import words

LEAST_GAIN = 0.05
"""Advice saves at least this share of a step. A smaller gain is within the error of predictions: a
plan that should have saved 3 % took 16 % longer (measured, docs/measurements.md)."""
FARTHEST = 4  # a boundary moves by at most this many layers
MOST = 5  # pieces of advice
FASTER = 2.0  # bandwidth of a better link, over the bandwidth of the present link


@dataclass(frozen=True)
class Advice:
    """A change, and the share of the step that it saves, predicted from the present costs."""

    change: str
    gain: float
    plan: Plan | None
    """The plan after the change, for `Pipeline(plan=...)`; None if the hardware must change."""

    def __str__(self) -> str:
        return f"{self.change} would save {100 * self.gain:.0f} % of the step, predicted"


def advise(plan: Plan, tables: Tables) -> tuple[Advice, ...]:
    """Return the best changes, at most one of each kind, the largest gain first.

    `tables` has the present costs by the samples of a micro-batch. Raises `PlanError` if they
    cannot price the plan.
    """
    priced = Priced(tables, _options(plan))
    now = priced.plan_again(plan)
    best: dict[str, Advice] = {}
    for kind, change, proposal in _changes(now, tables):
        limit_s = (1 - max(LEAST_GAIN, best[kind].gain if kind in best else 0.0)) * now.step_s
        after = _priced_below(priced, proposal, limit_s)
        if after is not None:
            best[kind] = Advice(change, 1 - after.step_s / now.step_s, after)
    for change, table in _links(now, nearest_table(tables, now)):
        gain = 1 - predicted_step_s(now, table) / now.step_s
        if gain >= max(LEAST_GAIN, best["link"].gain if "link" in best else 0.0):
            best["link"] = Advice(change, gain, None)
    return tuple(sorted(best.values(), key=lambda one: -one.gain)[:MOST])


def _options(plan: Plan) -> PlannerOptions:
    weights = "auto" if plan.rule.flushes else plan.weights
    return PlannerOptions(plan.mini_batch, weights=weights)


def _priced_below(priced: Priced, proposal: Proposal, limit_s: float) -> Plan | None:
    """Return the plan of a proposal if its step is at most `limit_s`; None if not, or if it cannot
    run."""
    try:
        if priced.bound_s(proposal) > limit_s:
            return None
        plan = priced.plan(proposal, "user")
    except HetpipeError:  # too little memory, a layer that a device lacks, or no costs for a size
        return None
    return plan if plan.step_s <= limit_s else None


Change = tuple[str, str, Proposal]  # kind, text, proposal


def _changes(plan: Plan, tables: Tables) -> Iterator[Change]:
    """Yield the proposals near a plan."""
    present = proposal_of(plan)
    if not plan.rule.replicates:
        yield from _moves(plan, present)
    yield from _microbatches(plan, present, tables)
    if nearest_table(tables, plan).trains:
        yield from _schedules(plan, present)
    if plan.recompute:
        yield (
            "recompute",
            "keeping tensors, not repeating forwards,",
            replace(present, recompute=False),
        )
    if len(set(plan.devices)) == len(plan.stages) and plan.rule.averages:
        yield from _orders(present)
        yield from _fewer(plan, present)


def _moves(plan: Plan, present: Proposal) -> Iterator[Change]:
    """Yield the proposals with one boundary some layers earlier or later."""
    ends = [0, *present.cuts, len(plan.layers)]
    for index in range(1, len(ends) - 1):
        sides = plan.stages[index - 1].devices, plan.stages[index].devices
        if sides[0] == sides[1]:
            continue
        for shift in range(-FARTHEST, FARTHEST + 1):
            cut = ends[index] + shift
            if shift and ends[index - 1] < cut < ends[index + 1]:
                cuts = (*present.cuts[: index - 1], cut, *present.cuts[index:])
                moved = sorted((cut, ends[index]))
                _, target = sides if shift < 0 else sides[::-1]
                text = f"moving {_layers(plan, *moved)} to {' + '.join(target)}"
                yield "cuts", text, replace(present, cuts=cuts)


def _layers(plan: Plan, lo: int, hi: int) -> str:
    names = words(plan.layers[lo:hi])
    if hi - lo == 1:
        return f"layer {lo} ({names})"
    return f"layers {lo}{' and' if hi - lo == 2 else ' to'} {hi - 1} ({names})"


def _microbatches(plan: Plan, present: Proposal, tables: Tables) -> Iterator[Change]:
    if not plan.rule.flushes:
        return  # a smaller micro-batch would change the updates
    rows, now = plan.mini_batch, plan.microbatches
    counts = {now // 4, now // 2, 2 * now, 4 * now, *(-(-rows // size) for size in tables)}
    for count in sorted(counts - {0, now}):
        if count <= rows and -(-rows // count) * (count - 1) < rows:  # none is empty
            text = f"{counted(count)} instead of {now}"
            yield "micro-batches", text, replace(present, microbatches=count, in_flight=())


def counted(microbatches: int) -> str:
    """Return the number of micro-batches as a text."""
    return f"{microbatches} micro-batch{'es' if microbatches > 1 else ''}"


def _schedules(plan: Plan, present: Proposal) -> Iterator[Change]:
    for name in schedule_names():
        rule = rule_of(name)
        alike = rule.several_stages == plan.rule.several_stages and not rule.replicates
        if name == plan.schedule or not alike or not rule.averages or plan.rule.replicates:
            continue
        kind, older, count = "schedule", "", present.microbatches
        if plan.rule.flushes and not rule.flushes:
            kind, older, count = "stream", ", which trains on older weights,", 1
        text = f"the schedule {name} instead of {plan.schedule}{older}"
        yield kind, text, replace(present, schedule=name, microbatches=count, in_flight=())


def _orders(present: Proposal) -> Iterator[Change]:
    """Yield the proposals in which two neighbours have changed places."""
    for index, (first, second) in enumerate(zip(present.groups, present.groups[1:], strict=False)):
        groups = (*present.groups[:index], second, first, *present.groups[index + 2 :])
        names = f"{' + '.join(first)} and {' + '.join(second)}"
        yield "order", f"swapping the stages of {names}", _placed(present, present.cuts, groups)


def _fewer(plan: Plan, present: Proposal) -> Iterator[Change]:
    """Yield the proposals without one stage's devices; a neighbour gets its layers."""
    for cut in range(len(present.cuts)):
        cuts = (*present.cuts[:cut], *present.cuts[cut + 1 :])
        for kept, left in ((cut, cut + 1), (cut + 1, cut)):
            groups = (*present.groups[:left], *present.groups[left + 1 :])
            target, gone = (" + ".join(present.groups[n]) for n in (kept, left))
            text = f"leaving out {gone}, with its layers on {target},"
            yield "devices", text, _placed(present, cuts, groups)


def _placed(present: Proposal, cuts: tuple[int, ...], groups: Groups) -> Proposal:
    return replace(present, cuts=cuts, groups=groups, in_flight=())


def _links(plan: Plan, table: CostTable) -> Iterator[tuple[str, CostTable]]:
    """Yield the table with each of the plan's links faster, in both directions."""
    for here, there in zip(plan.devices, plan.devices[1:], strict=False):
        if here == there:
            continue
        faster = dict(table.links)
        for way in ((here, there), (there, here)):
            link = table.link(*way)
            faster[way] = replace(link, bandwidth_Bps=FASTER * link.bandwidth_Bps)
        text = f"a link of {FASTER:.0f} times the bandwidth between {here} and {there}"
        yield text, replace(table, links=faster)
