"""Search: local search over proposals, with each move priced by simulation.

A move shifts a boundary layer, exchanges two stages' devices, joins the devices of two neighbours
as replicas of one stage, divides replicas between two stages, omits a stage's devices, or changes
the number of micro-batches, the schedule or the depth. Each round makes its best move. The search
ends when no move helps or the budget of prices is used up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np

from hetpipe.errors import PlanError, ScheduleError
from hetpipe.plan.costs import Objective
from hetpipe.plan.groups import best_partition
from hetpipe.plan.partition import moves
from hetpipe.plan.plan import Plan
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import (
    Groups,
    Proposal,
    deep_in_flight,
    groups_for,
    in_flight,
    proposal_of,
    single_device_groups,
)
from hetpipe.schedule.rule import rule_of
from hetpipe.schedule.weights import policy_of

KNOWN = ("1f1b", "gpipe")  # schedules from which a search chooses if the user names none
FREE_ORDER_DEVICES = 4  # up to this number of devices the planners try all orders
FEW = 5_000
"""Up to this number of partitions, all their bounds are compared; if there are more, only
`best_partition` chooses the cuts."""
PROMISING = 20  # how many of the partitions with the lowest bounds become proposals
SHALLOW = 8
"""With at most this many micro-batches in flight, each lower number is tried; with more, half the
number."""
PRICES, FRUGAL_PRICES = 120, 16
"""The most plans that a search prices; and the most if each price takes long."""
LARGE = 2_000  # if stages x layers are more, partitions and prices take long: few are tried
GAIN = 1e-6  # the search ends when no move has a larger relative gain
OBJECTIVES: tuple[Objective, ...] = ("sum", "max")


def propose_partitions(
    priced: Priced,
    groups: Groups,
    counts: Iterable[int] = (),
    recompute: bool | None = None,
    limit_s: float = math.inf,
) -> Iterator[Proposal]:
    """Yield proposals with a stage on each of these groups, with the best cuts for all numbers of
    micro-batches, schedules and depths that the options allow. Proposals whose step cannot be below
    `limit_s` are omitted."""
    options = priced.options
    if len(groups) > _layers(priced):
        return
    modes = (False, True) if options.recompute else (False,)
    for count in counts or worth_trying(priced, groups):
        for mode in modes if recompute is None else (recompute,):
            for schedule, placed, depths in _schedules(priced, groups, count):
                bare = Proposal((), placed, schedule, count, depths, mode)
                yield from fit_cuts(priced, bare, limit_s)


def propose_depths(
    priced: Priced, devices: Sequence[str], cuts: tuple[int, ...]
) -> Iterator[Proposal]:
    """Yield proposals with a stage on each device between these cuts, for all numbers of
    micro-batches, schedules and depths that the options allow."""
    alone = single_device_groups(devices)
    for count in priced.options.counts(priced.tables):
        for schedule, groups, depths in _schedules(priced, alone, count):
            yield Proposal(cuts, groups, schedule, count, depths)
            deepest = depths[0] if rule_of(schedule).any_depth else 1
            for most in range(deepest - 1, 0, -1):
                fewer = tuple(min(depth, most) for depth in depths)
                yield Proposal(cuts, groups, schedule, count, fewer)


def is_large(priced: Priced, groups: Sequence[Sequence[str]]) -> bool:
    """Whether partitions and prices of these stages take so long that few can be tried."""
    return len(groups) * _layers(priced) > LARGE


def _layers(priced: Priced) -> int:
    return len(next(iter(priced.tables.values())).layers)


def worth_trying(priced: Priced, groups: Groups) -> Sequence[int]:
    """Return the allowed numbers of micro-batches; for a large problem only the numbers nearest to
    2 and 4 times the number of stages."""
    counts = priced.options.counts(priced.tables)
    if not is_large(priced, groups):
        return counts
    stages = min(len(groups), _layers(priced))
    near = [min(counts, key=lambda m: abs(m - times * stages)) for times in (2, 4)]
    return list(dict.fromkeys(near))


def fit_cuts(priced: Priced, bare: Proposal, limit_s: float = math.inf) -> list[Proposal]:
    """Return the proposal with its best cuts, for each promising number of forwards in flight.

    Cuts that allow no step below `limit_s` are omitted. Fewer forwards in flight need less memory
    and so allow other cuts. They are tried only if memory may be short, and if the schedule works
    with any number.
    """
    alone = max(map(len, bare.groups)) == 1
    found: dict[tuple[int, ...], Proposal] = {}
    others: list[Proposal] = []
    while True:
        for cuts in best_cuts(priced, bare, limit_s):
            if cuts not in found:
                found[cuts] = replace(bare, cuts=cuts)
            elif not alone:  # only pricing finds the rows of unlike replicas, and so their bytes
                others.append(replace(bare, cuts=cuts))
        most = max(bare.in_flight)
        if most == 1 or not rule_of(bare.schedule).any_depth or _is_roomy(priced, bare):
            return [*found.values(), *others]
        fewer = most - 1 if most <= SHALLOW else most // 2
        bare = replace(bare, in_flight=tuple(min(depth, fewer) for depth in bare.in_flight))


def _is_roomy(priced: Priced, bare: Proposal) -> bool:
    """Whether each memory has room for the whole model on every device that uses the memory."""
    costs, deepest = priced.costs(bare), max(bare.in_flight)
    largest = max(layer.cut_nbytes for layer in costs.table.layers)
    most = costs.memory_nbytes(0, costs.count, deepest, max(priced.versions(bare)))
    most += (4 + deepest) * largest  # buffers of two cuts, and inputs that recompute keeps
    members = [costs.table.devices[device] for device in bare.devices]
    sharing = Counter(member.memory_domain for member in members)
    return all(sharing[each.memory_domain] * most <= each.memory_nbytes for each in members)


def best_cuts(priced: Priced, bare: Proposal, limit_s: float = math.inf) -> list[tuple[int, ...]]:
    """Return the cuts whose slowest stage is fastest and, if there are at most `FEW` partitions,
    the partitions with the lowest bounds."""
    costs, stages = priced.costs(bare), len(bare.groups)
    if stages > costs.count:
        return []
    best: list[tuple[int, ...]] = []
    count = math.comb(costs.count - 1, stages - 1)
    if count <= FEW:
        promising = priced.by_bound(bare, limit_s)
        fitting = (cuts for cuts in promising if _fits(priced, replace(bare, cuts=cuts)))
        best += islice(fitting, PROMISING)
        if count <= len(best) or not best:
            return best
    versions = priced.versions(bare)
    for objective in OBJECTIVES[:1] if is_large(priced, bare.groups) else OBJECTIVES:
        cuts = best_partition(
            costs, bare.groups, bare.in_flight, objective, bare.microbatches, versions
        )
        if cuts is not None and priced.bound_s(replace(bare, cuts=cuts)) < limit_s:
            best.append(cuts)
    return list(dict.fromkeys(best))


def _fits(priced: Priced, proposal: Proposal) -> bool:
    """Whether every stage can run and fits the memory, if replicas have equal shares."""
    if max(map(len, proposal.groups)) == 1:
        return priced.why_not(proposal) is None
    costs, versions = priced.costs(proposal), priced.versions(proposal)
    spans = proposal.spans(costs.count)
    for number, (group, (lo, hi)) in enumerate(zip(proposal.groups, spans, strict=True)):
        share = 1 / len(group) if rule_of(proposal.schedule).flushes else 1.0
        depth = proposal.in_flight[number]
        need = costs.memory_nbytes(lo, hi, depth, versions[number], share)
        if need > min(costs.table.devices[device].memory_nbytes for device in group):
            return False
    return True


def improve_plan(plan: Plan, priced: Priced, moves_only: bool = False) -> Plan:
    """Return the plan after changes that each shorten its predicted step; with `moves_only` only
    boundary layers move."""
    groups = [stage.devices for stage in plan.stages]
    best, left = plan, FRUGAL_PRICES if is_large(priced, groups) else PRICES
    while left > 0:
        bounds_s = {move: priced.bound_s(move) for move in _changes(best, priced, moves_only)}
        better = best
        for move, bound_s in sorted(bounds_s.items(), key=lambda item: item[1]):
            if bound_s >= better.step_s * (1 - GAIN) or left <= 0:
                break
            left -= 1
            try:
                moved = priced.plan(move, plan.origin)
            except PlanError:
                continue
            if moved.step_s < better.step_s * (1 - GAIN):
                better = moved
        if better is best:
            break
        best = better
    return best


def _changes(plan: Plan, priced: Priced, moves_only: bool) -> Iterator[Proposal]:
    """Yield the proposals one move away from a plan."""
    here = proposal_of(plan)
    large = is_large(priced, here.groups)
    for cuts in moves(here.cuts, len(plan.layers)):
        if not large or _relieves(plan, cuts):
            yield replace(here, cuts=cuts)
    if moves_only or rule_of(plan.schedule).replicates or rule_of(plan.schedule).several_stages:
        return
    yield from _other_passes(plan, priced)
    if large:
        return
    for groups in dict.fromkeys(_regrouped(here.groups, plan, priced)):
        yield from propose_partitions(
            priced, groups, [plan.microbatches], plan.recompute, plan.step_s
        )


def _relieves(plan: Plan, cuts: Sequence[int]) -> bool:
    """Whether the slowest stage has fewer layers with these cuts."""
    slowest = max(plan.stages, key=lambda stage: stage.forward_s + stage.backward_s)
    number = plan.stages.index(slowest)
    ends = (0, *cuts, len(plan.layers))
    return ends[number + 1] - ends[number] < slowest.hi - slowest.lo


def _other_passes(plan: Plan, priced: Priced) -> Iterator[Proposal]:
    """Yield the plan's stages with other numbers of micro-batches, schedules and depths."""
    here, options = proposal_of(plan), priced.options
    counts = options.counts(priced.tables)
    near = [count for count in counts if count in (plan.microbatches // 2, 2 * plan.microbatches)]
    modes = (False, True) if options.recompute else (False,)
    for count in (plan.microbatches, *near):
        for schedule, groups, depths in _schedules(priced, here.groups, count):
            for mode in modes:
                other = Proposal(here.cuts, groups, schedule, count, depths, mode)
                if other != here and groups == here.groups:
                    yield other


def _regrouped(groups: Groups, plan: Plan, priced: Priced) -> Iterator[Groups]:
    """Yield the plan's groups with one change: the slowest stage exchanges devices, is joined to a
    neighbour or is divided; or the slowest or the fastest stage is omitted."""
    busy_s = [stage.forward_s + stage.backward_s for stage in plan.stages]
    slowest = int(np.argmax(busy_s))
    count = len(groups)
    if priced.options.free_order:
        for other in range(count):
            if other != slowest:
                exchanged = list(groups)
                exchanged[slowest], exchanged[other] = groups[other], groups[slowest]
                yield tuple(exchanged)
    if priced.options.replicas:
        for first in {slowest - 1, slowest} & set(range(count - 1)):
            yield (*groups[:first], groups[first] + groups[first + 1], *groups[first + 2 :])
        if len(groups[slowest]) > 1:
            half = len(groups[slowest]) // 2
            parts = groups[slowest][:half], groups[slowest][half:]
            yield (*groups[:slowest], *parts, *groups[slowest + 1 :])
    if count > 1:
        for number in {slowest, int(np.argmin(busy_s))}:
            yield (*groups[:number], *groups[number + 1 :])


def _schedules(
    priced: Priced, groups: Groups, microbatches: int
) -> Iterator[tuple[str, Groups, tuple[int, ...]]]:
    """Yield (schedule, the group of each stage, the forwards in flight of each stage) for all
    schedules that may run these groups."""
    replicated = max(map(len, groups)) > 1
    large = is_large(priced, groups)
    for schedule in priced.options.among(KNOWN[:1] if large else KNOWN):
        rule = rule_of(schedule)
        if rule.replicates or (replicated and (rule.several_stages or not rule.averages)):
            continue
        weights = priced.weights(schedule)
        takes_parts = rule.flushes or policy_of(weights).accumulates
        if microbatches > 1 and not takes_parts and priced.options.microbatches != (microbatches,):
            continue  # the policy does not accumulate: only the user may divide a mini-batch
        try:
            placed = groups_for(schedule, groups, microbatches)
        except ScheduleError:  # the schedule does not allow this number of micro-batches
            continue
        for depths in _depths(schedule, weights, len(placed), microbatches):
            yield schedule, placed, depths


@cache
def _depths(
    schedule: str, weights: str, stages: int, microbatches: int
) -> Sequence[tuple[int, ...]]:
    """Return promising depths: the schedule's and, if the schedule allows them, deeper ones."""
    rule, policy = rule_of(schedule), policy_of(weights)
    own = in_flight(schedule, stages, microbatches)
    if rule.flushes:
        deeper = [deep_in_flight(stages, microbatches)] if rule.any_depth else []
        return tuple(dict.fromkeys([own, *deeper]))
    hiding = deep_in_flight(stages, 2 * stages)
    defined = tuple(
        depths for depths in dict.fromkeys([own, hiding]) if policy.has_depth(depths, microbatches)
    )
    return defined or (own,)
