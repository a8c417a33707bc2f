"""Priced: prices the proposals of all planners by one cost model and one simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations

import numpy as np

from hetpipe.cost.between import with_sizes_between
from hetpipe.cost.table import CostTable
from hetpipe.errors import CostError, PlanError, ScheduleError
from hetpipe.plan.building import build_plan
from hetpipe.plan.costs import Array, StageCosts
from hetpipe.plan.limits import check_memory, why_impossible
from hetpipe.plan.plan import Plan
from hetpipe.plan.proposal import Cuts, Groups, PlannerOptions, Proposal, Tables, proposal_of
from hetpipe.schedule.rule import GPIPE, Rule, rule_of
from hetpipe.schedule.weights import FLUSH, policy_for, policy_of


@dataclass(frozen=True)
class Priced:
    """Prices proposals by `tables`, and keeps all prices, since proposals share many stages."""

    tables: Tables
    options: PlannerOptions
    _costs: dict[tuple[int, int, bool], StageCosts] = field(default_factory=dict, compare=False)
    _counts: dict[Groups, int] = field(default_factory=dict, compare=False)
    _plans: dict[Proposal, Plan | PlanError] = field(default_factory=dict, compare=False)
    _bounds_s: dict[Proposal, float] = field(default_factory=dict, compare=False)
    _by_bound: dict[tuple[Groups, int, bool, bool], tuple[Array, Array]] = field(
        default_factory=dict, compare=False
    )

    def plan(self, proposal: Proposal, origin: str) -> Plan:
        """Return the plan of a proposal. Raises `PlanError` if the proposal cannot run."""
        if proposal not in self._plans:
            try:
                self._plans[proposal] = self._new_plan(proposal)
            except (CostError, PlanError, ScheduleError) as error:
                self._plans[proposal] = PlanError(str(error))
        plan = self._plans[proposal]
        if isinstance(plan, PlanError):
            raise plan
        return replace(plan, origin=origin)

    def plan_again(self, plan: Plan) -> Plan:
        """Return the plan with a new price; replicas keep their rows. Raises `PlanError`."""
        rows = [tuple(map(round, stage.shares)) for stage in plan.stages]
        try:
            made = self._new_plan(proposal_of(plan), rows)
        except (CostError, ScheduleError) as error:
            raise PlanError(str(error)) from error
        return replace(made, origin=plan.origin)

    def _new_plan(self, proposal: Proposal, rows: Sequence[Sequence[int]] = ()) -> Plan:
        rule = rule_of(proposal.schedule)
        if (why_not := self._why_no_loss(rule)) is not None:
            raise PlanError(why_not)
        alone = max(map(len, proposal.groups)) == 1 and rule.averages and not rule.replicates
        if alone and (why_not := self.why_not(proposal)) is not None:
            raise PlanError(why_not)
        sizes = [*self.tables] if rule.replicates else self._sizes(proposal)
        if alone:
            sizes = sizes[-1:]
        costs = {size: self._costs_at(size, proposal) for size in sizes}
        weights = self.weights(proposal.schedule)
        plan = build_plan(proposal, costs, self.options.mini_batch, weights, rows)
        if not alone:
            check_memory(plan)
        return plan

    def _why_no_loss(self, rule: Rule) -> str | None:
        """Return why a schedule cannot have the loss over the mini-batch; None if it can, or if
        there is no such loss."""
        table, asked = next(iter(self.tables.values())), self.options.mini_batch
        cost = next(iter(table.whole_loss.values()), None)
        if cost is not None and rule != GPIPE:
            return (
                "the loss over the mini-batch needs all outputs before the first backward, and "
                f"{rule.name} does not wait for them: choose {GPIPE.name}"
            )
        if cost is not None and cost.mini_batch != asked:
            return (
                f"the loss was priced for mini-batches of {cost.mini_batch} samples, not {asked}: "
                f"plan for {cost.mini_batch}, or measure the costs again"
            )
        return None

    def why_not(self, proposal: Proposal) -> str | None:
        """Return why a proposal without replicas cannot run; None if it can."""
        return why_impossible(proposal, self.costs(proposal), self.weights(proposal.schedule))

    def bound_s(self, proposal: Proposal) -> float:
        """Return a lower bound of the step; this takes much less time than a price."""
        if rule_of(proposal.schedule).replicates:
            return 0.0
        if proposal not in self._bounds_s:
            self._bounds_s[proposal] = float(self.bounds_s(proposal, [proposal.cuts])[0])
        return self._bounds_s[proposal]

    def by_bound(self, bare: Proposal, limit_s: float) -> Iterator[Cuts]:
        """Yield the cuts whose bounds are below `limit_s`, the lowest bound first.

        `bare` is the proposal; its own cuts do not count.
        """
        key = bare.groups, bare.microbatches, bare.recompute, rule_of(bare.schedule).flushes
        if key not in self._by_bound:
            every = _all_cuts(self.costs(bare).count, len(bare.groups))
            bounds_s = self.bounds_s(bare, every)
            ranks = np.argsort(bounds_s, kind="stable")
            self._by_bound[key] = every[ranks], bounds_s[ranks]
        every, bounds_s = self._by_bound[key]
        for cuts in every[: int(np.searchsorted(bounds_s, limit_s))]:
            yield tuple(cuts.tolist())

    def bounds_s(self, bare: Proposal, every: Array) -> Array:
        """Return a lower bound of a proposal's step for each row of cuts.

        A stage runs the passes of all micro-batches. If the schedule flushes, the longer of two
        times is added: the passes and transfers of one micro-batch in the earlier stages, or the
        stage's update, after the gradients of its replicas are summed.
        """
        costs, flushes = self.costs(bare), rule_of(bare.schedule).flushes
        rows = np.asarray(every, int).reshape(len(every), -1).T
        ends = (np.zeros(len(every), int), *rows, np.full(len(every), costs.count))
        bound_s = way_s = np.zeros(len(every))
        for number, group in enumerate(bare.groups):
            lo, hi = ends[number], ends[number + 1]
            stage_s = self._stage_s(bare, group, lo, hi)
            after_s = _sum_and_update_s(costs, group, lo, hi) if flushes else 0.0
            passes_s = bare.microbatches * stage_s
            bound_s = np.maximum(bound_s, passes_s + np.maximum(way_s, after_s))
            if not flushes:
                continue  # without flushes only the first micro-batch waits for the earlier stages
            way_s = way_s + stage_s
            following = bare.groups[number + 1 : number + 2]
            if len(group) == 1 and following and len(following[0]) == 1:
                here, there = group[0], following[0][0]
                way_s = (
                    way_s + costs.transfer_s(here, there, hi) + costs.gradient_s(there, here, hi)
                )
        return bound_s + costs.table.step_overhead_s if flushes else bound_s

    def _stage_s(self, bare: Proposal, group: Sequence[str], lo: Array, hi: Array) -> Array:
        """Return the least seconds of a micro-batch in a stage, for each pair of `lo` and `hi`.

        A replica with a share of the rows takes at least this share of the time of all rows. If the
        schedule flushes, it also takes at least the time of the smallest micro-batch with costs.
        """
        costs = self.costs(bare)
        kinds = costs.alike(tuple(group))
        both_s = [np.maximum(costs.compute_s(device, lo, hi), 1e-300) for device in kinds]
        if len(group) == 1:
            return both_s[0]
        with np.errstate(divide="ignore"):  # the sum is 0 if no replica can run the layers
            counts = kinds.values()
            stage_s = 1 / sum(n / each_s for n, each_s in zip(counts, both_s, strict=True))
        if rule_of(bare.schedule).flushes:
            smallest = self._costs_at(self._sizes(bare)[0], bare)
            for device in kinds:
                stage_s = np.maximum(stage_s, smallest.compute_s(device, lo, hi))
        return stage_s

    def quickest(self, proposals: Iterable[Proposal], origin: str) -> Plan:
        """Return the plan with the shortest step; among equal plans, the one with least memory.

        Stops when no bound allows a shorter step. If no proposal can run, raises the `PlanError` of
        the proposal with the lowest bound.
        """
        bounds_s = {proposal: self.bound_s(proposal) for proposal in dict.fromkeys(proposals)}
        best: Plan | None = None
        refusal: PlanError | None = None
        for proposal, bound_s in sorted(bounds_s.items(), key=lambda item: item[1]):
            if best is not None and bound_s > best.step_s:
                break
            try:
                plan = self.plan(proposal, origin)
            except PlanError as error:
                refusal = refusal or error
                continue
            if best is None or _rank(plan) < _rank(best):
                best = plan
        if best is None:
            raise refusal or PlanError(f"the planner {origin} proposed nothing; give more devices")
        return best

    def shortest_s(self, proposals: Iterable[Proposal]) -> float:
        """Return the shortest step of the proposals, infinite if none can run."""
        try:
            return self.quickest(proposals, "").step_s
        except PlanError:
            return math.inf

    def costs(self, proposal: Proposal) -> StageCosts:
        """Return the costs at the proposal's micro-batch size while all its devices compute."""
        return self._costs_at(self.options.size(proposal.microbatches), proposal)

    def _costs_at(self, size: int, proposal: Proposal) -> StageCosts:
        groups = proposal.groups
        if groups not in self._counts:
            self._counts[groups] = len(set(proposal.devices))
        key = size, self._counts[groups], proposal.recompute
        if key not in self._costs:
            table = self.table(size).beside(key[1])
            self._costs[key] = StageCosts(table, proposal.recompute)
        return self._costs[key]

    def table(self, size: int) -> CostTable:
        """Return the costs at a size of micro-batches, modelled if the size was not measured.

        Raises `PlanError` for a size outside the known sizes.
        """
        tables = self.tables if size in self.tables else with_sizes_between(self.tables, [size])
        if size not in tables:
            raise PlanError(
                f"costs are known for micro-batches of {min(self.tables)} to {max(self.tables)} "
                f"samples, not of {size}: choose another number of micro-batches, or profile this "
                "size"
            )
        return tables[size]

    def _sizes(self, proposal: Proposal) -> list[int]:
        """Return the known sizes below the size of the proposal's micro-batches, then that size."""
        size = self.options.size(proposal.microbatches)
        return [*sorted(known for known in self.tables if known < size), size]

    def versions(self, proposal: Proposal) -> list[int]:
        """Return, by stage, how many versions of the weights it keeps; cuts do not matter."""
        policy = policy_of(self.weights(proposal.schedule))
        depths = proposal.in_flight
        return [policy.versions(depths, n, proposal.microbatches) for n in range(len(depths))]

    def weights(self, schedule: str) -> str:
        """Return the policy for versions of the weights under a schedule."""
        rule = rule_of(schedule)
        return FLUSH.name if rule.flushes else policy_for(rule, self.options.weights).name


@cache
def _all_cuts(layers: int, stages: int) -> Array:
    """Return all ways to cut the layers into stages; each row has the cuts of one."""
    return np.array(list(combinations(range(1, layers), stages - 1)), int)


def _rank(plan: Plan) -> tuple[float, int]:
    """Return the key of the ranking: the step (rounded), then the memory."""
    return float(f"{plan.step_s:.8e}"), sum(stage.memory_nbytes for stage in plan.stages)


def _sum_and_update_s(costs: StageCosts, group: Sequence[str], lo: Array, hi: Array) -> Array:
    """Return the least seconds in which a stage's replicas sum their gradients and update."""
    seconds = 0.0
    for device in costs.alike(tuple(group)):
        seconds = np.maximum(seconds, costs.least_update_s(device, lo, hi))
    if len(group) == 1:
        return seconds
    fastest_Bps = max(link.sum_Bps for link in costs.table.chain((*group, group[0])))
    return seconds + 2 * (1 - 1 / len(group)) * costs.gradient_nbytes(lo, hi) / fastest_Bps
