"""Proposals: pipelines that planners propose, all priced by one cost model and one simulator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from hetpipe.cost.between import with_sizes_between
from hetpipe.cost.table import CostTable
from hetpipe.errors import CostError, PlanError, ScheduleError
from hetpipe.plan.costs import StageCosts
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.plan.pricing import Partition, Question, lower_bound_s, price, why_impossible
from hetpipe.plan.replicated import Passes, replicated_plan, staged_plan
from hetpipe.schedule.generators import max_in_flight
from hetpipe.schedule.rule import rule_of
from hetpipe.schedule.turns import noam
from hetpipe.schedule.weights import policy_for, policy_of
from hetpipe.words import words

Tables = Mapping[int, CostTable]
"""Costs by the samples of a micro-batch."""

MIB = 2**20


@dataclass(frozen=True)
class PlannerOptions:
    """The mini-batch, and the choices of a planner. Raises `PlanError`.

    Asynchronous schedules are chosen only if `schedules` names them; `weights` is then the policy
    for versions of the weights.
    """

    mini_batch: int
    microbatches: tuple[int, ...] = ()
    """Numbers of micro-batches; empty: powers of two for whose sizes there are costs."""
    schedules: tuple[str, ...] = ()
    """Schedules to choose from; empty: all that the planner knows and that flush."""
    weights: str = "auto"
    replicas: bool = True
    """Whether several devices may have the same stage."""
    recompute: bool = False
    """Whether stages may keep only their inputs, and repeat forwards."""
    free_order: bool = True
    """Whether stages may use the devices in another order than the cluster's."""
    channels: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Output channels of the layers that may be split between two stages."""

    def __post_init__(self) -> None:
        if self.mini_batch < 1:
            raise PlanError(f"a mini-batch of {self.mini_batch} samples; give 1 or more")
        for count in self.microbatches:
            if not 1 <= count <= self.mini_batch:
                raise PlanError(
                    f"a mini-batch of {self.mini_batch} cannot be {count} micro-batches; choose 1 "
                    f"to {self.mini_batch}"
                )
        for schedule in self.schedules:
            rule_of(schedule)

    def counts(self, tables: Tables) -> tuple[int, ...]:
        """Return the numbers of micro-batches to choose from, ascending. Raises `PlanError`."""
        if self.microbatches:
            return tuple(sorted(set(self.microbatches)))
        least, most = min(tables), max(tables)
        powers = (2**k for k in range(self.mini_batch.bit_length()))
        counts = [
            m
            for m in powers
            if least <= self.size(m) <= most and self.size(m) * (m - 1) < self.mini_batch
        ]
        if not counts:
            raise PlanError(
                f"costs are known for micro-batches of {least} to {most} samples, and none of "
                f"these divides a mini-batch of {self.mini_batch}: choose another, or profile "
                "other sizes"
            )
        return tuple(counts)

    def among(self, own: Sequence[str]) -> tuple[str, ...]:
        """Return the schedules to choose from, for a planner that knows `own`."""
        return self.schedules or tuple(own)

    @property
    def data_parallel(self) -> bool:
        """Whether a plan may have the whole model on several devices, under `data-parallel`."""
        return self.replicas and "data-parallel" in (self.schedules or ("data-parallel",))

    def size(self, microbatches: int) -> int:
        """Return the samples of the largest of this number of micro-batches."""
        return -(-self.mini_batch // microbatches)


@dataclass(frozen=True)
class Proposal:
    """A pipeline without prices: `groups` has, for each stage, the devices of its replicas."""

    cuts: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]
    schedule: str
    microbatches: int
    in_flight: tuple[int, ...] = ()
    """By stage; empty: the schedule's own."""
    recompute: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, in the order of the stages."""
        return tuple(device for group in self.groups for device in group)


@dataclass(frozen=True)
class Priced:
    """Prices proposals by `tables`; the prices of stages that proposals share are kept."""

    tables: Tables
    options: PlannerOptions
    _costs: dict[tuple[int, int, bool], StageCosts] = field(default_factory=dict, compare=False)

    def plan(self, proposal: Proposal, origin: str) -> Plan:
        """Return the plan with its predicted step. Raises `PlanError` if it cannot run."""
        rule = rule_of(proposal.schedule)
        if rule.replicates:
            plan = replicated_plan(
                self.tables, proposal.devices, proposal.cuts, mini_batch=self.options.mini_batch,
                microbatches=proposal.microbatches,
            )  # fmt: skip
        elif max(map(len, proposal.groups)) > 1 or not rule.averages:
            passes = Passes(
                proposal.schedule, proposal.microbatches, self._weights(proposal),
                proposal.in_flight, proposal.recompute,
            )  # fmt: skip
            plan = staged_plan(
                self.tables_near(proposal), proposal.groups, proposal.cuts, passes,
                mini_batch=self.options.mini_batch,
            )  # fmt: skip
        else:
            question, partition = self._question(proposal), self._partition(proposal)
            why_not = why_impossible(question, partition)
            if why_not is not None:
                raise PlanError(why_not)
            return price(question, partition, origin)
        check_memory(plan)
        return replace(plan, origin=origin)

    def why_not(self, proposal: Proposal) -> str | None:
        """Return why a proposal without replicas cannot run; None if it can."""
        return why_impossible(self._question(proposal), self._partition(proposal))

    def bound_s(self, proposal: Proposal) -> float:
        """Return a lower bound of the step, much faster than its price."""
        if max(map(len, proposal.groups)) == 1:
            return lower_bound_s(self._question(proposal), self._partition(proposal))
        costs = self.costs(proposal)
        ends = zip((0, *proposal.cuts), (*proposal.cuts, costs.count), strict=True)
        slowest_s = 0.0
        for group, (lo, hi) in zip(proposal.groups, ends, strict=True):
            speed = sum(1 / max(costs.stage_compute_s(d, lo, hi), 1e-300) for d in group)
            slowest_s = max(slowest_s, 1 / speed if speed else math.inf)
        return proposal.microbatches * slowest_s

    def quickest(self, proposals: Iterable[Proposal], origin: str) -> Plan:
        """Return the plan with the shortest step; stop when no bound allows a shorter one.

        Raises the `PlanError` of the most promising proposal if none can run.
        """
        bounds_s = {proposal: self.bound_s(proposal) for proposal in dict.fromkeys(proposals)}
        best: Plan | None = None
        refusal: PlanError | None = None
        for proposal, bound_s in sorted(bounds_s.items(), key=lambda item: item[1]):
            if best is not None and bound_s >= best.step_s:
                break
            try:
                plan = self.plan(proposal, origin)
            except (CostError, PlanError, ScheduleError) as error:
                refusal = refusal or PlanError(str(error))
                continue
            if best is None or plan.step_s < best.step_s:
                best = plan
        if best is None:
            raise refusal or PlanError(f"the planner {origin} proposed nothing; give more devices")
        return best

    def costs(self, proposal: Proposal) -> StageCosts:
        """Return the costs at the proposal's micro-batches, while its devices compute."""
        size, count = self.options.size(proposal.microbatches), len(set(proposal.devices))
        key = size, count, proposal.recompute
        if key not in self._costs:
            table = self.table(size).beside(count)
            self._costs[key] = StageCosts(table, proposal.recompute)
        return self._costs[key]

    def table(self, size: int) -> CostTable:
        """Return the costs at a size of micro-batch, or between two. Raises `PlanError`."""
        tables = self.tables if size in self.tables else with_sizes_between(self.tables, [size])
        if size not in tables:
            raise PlanError(
                f"costs are known for micro-batches of {min(self.tables)} to {max(self.tables)} "
                f"samples, not of {size}: choose another number of micro-batches, or profile at it"
            )
        return tables[size]

    def tables_near(self, proposal: Proposal) -> dict[int, CostTable]:
        """Return the tables up to and including the size of the whole micro-batch."""
        size = self.options.size(proposal.microbatches)
        smaller = {known: table for known, table in self.tables.items() if known < size}
        return {**smaller, size: self.table(size)}

    def versions(self, proposal: Proposal) -> list[int]:
        """Return the versions of the weights that exist at once, by stage; it needs no cuts."""
        policy = policy_of(self._weights(proposal))
        depths = proposal.in_flight
        return [policy.versions(depths, n, proposal.microbatches) for n in range(len(depths))]

    def _weights(self, proposal: Proposal) -> str:
        rule = rule_of(proposal.schedule)
        return policy_for(rule, "auto" if rule.flushes else self.options.weights).name

    def _question(self, proposal: Proposal) -> Question:
        return Question(
            self.costs(proposal), proposal.schedule, self.options.mini_batch,
            proposal.microbatches, self._weights(proposal),
        )  # fmt: skip

    def _partition(self, proposal: Proposal) -> Partition:
        devices = tuple(group[0] for group in proposal.groups)
        depths = proposal.in_flight or in_flight(
            proposal.schedule, len(devices), proposal.microbatches
        )
        return Partition(devices, proposal.cuts, depths)


@cache
def in_flight(schedule: str, stages: int, microbatches: int) -> tuple[int, ...]:
    """Return the micro-batches in flight under a schedule by default, by stage."""
    rule = rule_of(schedule)
    if not rule.flushes:
        return tuple(noam([1] * stages))
    workers = stages // rule.stages_per_worker
    return tuple(max_in_flight(rule.rows(stages, microbatches, workers=workers)))


def deep_in_flight(stages: int, microbatches: int) -> tuple[int, ...]:
    """Return 2 (N - n) - 1 micro-batches in flight by stage: they hide transfers (DAPPLE's P_B)."""
    return tuple(min(2 * (stages - n) - 1, microbatches) for n in range(stages))


def check_memory(plan: Plan) -> None:
    """Raise `PlanError` for the stage that lacks most memory, with the bytes."""
    lacks = [stage.memory_nbytes - stage.capacity_nbytes for stage in plan.stages]
    worst = max(range(len(lacks)), key=lacks.__getitem__)
    if lacks[worst] > 0:
        raise PlanError(lack(worst, plan.stages[worst]))


def lack(number: int, stage: StagePlan) -> str:
    """Describe the bytes that a stage lacks."""
    need, capacity = stage.memory_nbytes, stage.capacity_nbytes
    return (
        f"stage {number} (layers {stage.lo}..{stage.hi - 1} on {words(stage.devices)}) needs "
        f"{need} bytes ({need / MIB:.1f} MiB) and has {capacity} ({capacity / MIB:.1f} MiB): "
        f"{need - capacity} bytes are missing"
    )


def single_device_groups(devices: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return groups with a stage on each device."""
    return tuple((device,) for device in devices)
