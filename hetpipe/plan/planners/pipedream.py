"""PipeDream: stages and their replicas on a hierarchy of equal devices (section 3.1).

The paper's devices are equal, so unlike devices count by their mean times, and stages take devices
in the cluster's order. Asynchronous schedules take a mini-batch whole, as the paper does; the
stages are also proposed for schedules that divide the mini-batch into micro-batches.

A level of the hierarchy joins equal components by links of one bandwidth; the components of the
innermost level are single workers. A plan uses all workers. The paper's T_l, a_l and w_l are
`forward_s` + `backward_s`, `cut_nbytes` and `params_nbytes` of a chain of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import chain, islice, permutations
from typing import Literal, get_args

import numpy as np

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.links import slowest_pairs
from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.errors import ClusterError, PlanError
from hetpipe.plan.chain import chain_of, check_finite
from hetpipe.plan.costs import Array
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import chosen
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, Tables, single_device_groups
from hetpipe.plan.search import is_large, worth_trying
from hetpipe.schedule.rule import rule_of
from hetpipe.schedule.turns import noam
from hetpipe.words import choices

SyncRule = Literal["text", "published-code"]
"""How the synchronisation of a stage's gradients counts, for m replicas and w bytes of weights.

`text`: 2 (m-1)/m w / bandwidth at the same time as the computation, as the paper's text says.
`published-code`: 4 (m-1)/m w / bandwidth after the computation. Also, the replicas of the later
stage divide the transfer at a cut. And if the first stage of a level is replicated on the level's
components, the parts of a component (the components of the next lower level) divide the stage's
synchronisation. The authors drop Input nodes from the profile.
"""


@dataclass(frozen=True)
class Level:
    """`count` equal components and their links. Raises `PlanError` without components or links."""

    count: int
    bandwidth_Bps: float

    def __post_init__(self) -> None:
        if self.count < 1:
            raise PlanError(f"a level has {self.count} components; give 1 or more")
        if not self.bandwidth_Bps > 0:
            raise PlanError(f"a level's bandwidth is {self.bandwidth_Bps} B/s; give more than 0")


@dataclass(frozen=True)
class PipeDreamStage:
    """Layers `first_layer` to `last_layer`, both included, on each of `replicas` workers."""

    first_layer: int
    last_layer: int
    replicas: int


@dataclass(frozen=True)
class PipeDreamPlan:
    """The stages from input to output, and the seconds of a mini-batch in the steady state."""

    stages: tuple[PipeDreamStage, ...]
    bottleneck_s: float

    def in_flight(self) -> tuple[int, ...]:
        """Return, per stage, the mini-batches that each replica has in flight (section 3.2).

        At the input stage this is NOAM: workers over replicas, rounded up.
        """
        return tuple(noam([stage.replicas for stage in self.stages]))


def plan_pipedream(
    chain: ChainCosts,
    levels: Sequence[Level],
    rule: SyncRule = "text",
    capacity_nbytes: int | None = None,
) -> PipeDreamPlan:
    """Return the plan with the lowest `bottleneck_s`; `levels` start with the innermost one.

    For each mini-batch in flight a worker keeps a version of its stage's weights, and activations.
    The search takes O(L^3 count^2) per level, in numpy, and O(L^2 count^2) at the outermost level.
    Raises `PlanError` if no plan fits `capacity_nbytes` per worker.
    """
    search = _Search(chain, levels, rule, capacity_nbytes)
    depth, last = len(levels), len(chain.names) - 1
    bottleneck_s = float(search.partition(depth, Fraction(0)).time_s[0, last])
    if math.isfinite(bottleneck_s):
        stages = search.stages(depth, Fraction(0), PipeDreamStage(0, last, 1))
        return PipeDreamPlan(tuple(stages), bottleneck_s)
    fastest = plan_pipedream(chain, levels, rule)
    needed_nbytes = max(stage_memory_nbytes(chain, fastest))
    raise PlanError(
        f"no plan fits {capacity_nbytes} bytes per worker; the fastest plan without a limit needs "
        f"{needed_nbytes}: allow as much, or give more workers"
    )


def data_parallel_s(chain: ChainCosts, levels: Sequence[Level], rule: SyncRule = "text") -> float:
    """Return the seconds of a mini-batch with the whole chain replicated on every worker."""
    _check(chain, levels, rule)
    time_s, params_nbytes = sum(chain.forward_s) + sum(chain.backward_s), sum(chain.params_nbytes)
    inside = 1
    for level in levels:
        time_s = _replicated_s(rule, time_s, params_nbytes, level.count, level, inside)
        inside = level.count
    return float(time_s)


def stage_memory_nbytes(chain: ChainCosts, plan: PipeDreamPlan) -> tuple[int, ...]:
    """Return a worker's bytes in each stage: weights and activations per mini-batch in flight."""
    kept = [w + a for w, a in zip(chain.params_nbytes, chain.activation_nbytes, strict=True)]
    return tuple(
        versions * sum(kept[stage.first_layer : stage.last_layer + 1])
        for stage, versions in zip(plan.stages, plan.in_flight(), strict=True)
    )


def _check(chain: ChainCosts, levels: Sequence[Level], rule: SyncRule) -> None:
    check_finite(chain)
    if not levels:
        raise PlanError("the topology has 0 levels; give 1 or more")
    if rule not in get_args(SyncRule):
        raise PlanError(
            f"no rule {rule!r} for sums of gradients; {choices(rule, get_args(SyncRule))}"
        )


def _replicated_s(
    rule: SyncRule, time_s: Array, params: Array, replicas: int, level: Level, sharing: int
) -> Array:
    """Return the paper's T^k: a stage's seconds on `replicas` components. Each component takes
    `time_s` for a mini-batch. By the published code, `sharing` parts of a component divide the
    synchronisation."""
    moved = (replicas - 1) * params / level.bandwidth_Bps
    if rule == "published-code":
        return (time_s + 4 * moved / replicas / sharing) / replicas
    return np.maximum(time_s, 2 * moved / replicas) / replicas


@dataclass(frozen=True)
class _Partition:
    """The paper's A^k of all runs of layers [first, last], and the last stages of best partitions.

    For the best partition on m components, `replicas[m][first, last]` is the last stage's number of
    replicas, and `splits[m][first, last]` the layer before the last stage.
    """

    time_s: Array
    replicas: dict[int, Array]
    splits: dict[int, Array]


class _Search:
    """The dynamic programme. Depth 0 is one worker, depth k the first k levels.

    `behind` is the number of workers of later stages, divided by the number of copies of the
    partition. It decides how many mini-batches are in flight, and matters only with a capacity.
    """

    def __init__(
        self,
        chain: ChainCosts,
        levels: Sequence[Level],
        rule: SyncRule,
        capacity_nbytes: int | None,
    ) -> None:
        _check(chain, levels, rule)
        self.levels, self.rule, self.capacity_nbytes = levels, rule, capacity_nbytes
        passes = zip(chain.forward_s, chain.backward_s, strict=True)
        self.compute_s = _runs([forward_s + backward_s for forward_s, backward_s in passes])
        self.compute_s[np.tri(len(chain.names), k=-1, dtype=bool)] = math.inf
        self.params_nbytes = _runs(chain.params_nbytes)
        self.kept_nbytes = self.params_nbytes + _runs(chain.activation_nbytes)
        self.cut_nbytes = np.array(chain.cut_nbytes, float)
        self.partition = cache(self._partition)
        self.replicated = cache(self._replicated)

    def stages(self, depth: int, behind: Fraction, run: PipeDreamStage) -> list[PipeDreamStage]:
        """Return the stages of the best partition of the layers of `run`, whose `replicas` are the
        copies of the partition."""
        if depth == 0:
            return [run]
        partition = self.partition(depth, behind)
        used, last = self.levels[depth - 1].count, run.last_layer
        stages: list[PipeDreamStage] = []
        while used:
            replicas = int(partition.replicas[used][run.first_layer, last])
            split = int(partition.splits[used][run.first_layer, last])
            inner = PipeDreamStage(split + 1, last, replicas * run.replicas)
            inner_behind = self._behind(depth, behind, used, replicas)
            stages = self.stages(depth - 1, inner_behind, inner) + stages
            used, last = used - replicas, split
        return stages

    def _partition(self, depth: int, behind: Fraction) -> _Partition:
        if depth == 0:
            versions = math.ceil(1 + behind)
            capacity_nbytes = math.inf if self.capacity_nbytes is None else self.capacity_nbytes
            fits = versions * self.kept_nbytes <= capacity_nbytes
            return _Partition(np.where(fits, self.compute_s, math.inf), {}, {})
        level = self.levels[depth - 1]
        firsts = 1 if depth == len(self.levels) else len(self.cut_nbytes)
        times: dict[int, Array] = {}
        replicas_of: dict[int, Array] = {}
        splits: dict[int, Array] = {}
        unit = -(-level.count // MOST)
        for used in reversed(range(level.count, 0, -unit)):
            alone = self.replicated(depth, used, self._behind(depth, behind, used, used), True)
            times[used] = alone[:firsts].copy()
            replicas_of[used] = np.full(times[used].shape, used)
            splits[used] = np.repeat(np.arange(firsts)[:, None] - 1, len(self.cut_nbytes), axis=1)
            for replicas in range(unit, used, unit):
                stage_s = self.replicated(
                    depth, replicas, self._behind(depth, behind, used, replicas)
                )
                before_s = np.maximum(times[used - replicas], self._transfer_s(level, replicas))
                for first in range(min(firsts, len(self.cut_nbytes) - 1)):
                    split, time_s = _best_splits(first, before_s, stage_s)
                    better = np.flatnonzero(time_s < times[used][first, first + 1 :])
                    lasts = first + 1 + better
                    times[used][first, lasts] = time_s[better]
                    replicas_of[used][first, lasts] = replicas
                    splits[used][first, lasts] = split[better]
        return _Partition(times[level.count], replicas_of, splits)

    def _replicated(
        self, depth: int, replicas: int, behind: Fraction, is_first: bool = False
    ) -> Array:
        time_s = self.partition(depth - 1, behind).time_s
        level, sharing = self.levels[depth - 1], 1
        if is_first and depth > 1:
            sharing = self.levels[depth - 2].count
        return _replicated_s(self.rule, time_s, self.params_nbytes, replicas, level, sharing)

    def _transfer_s(self, level: Level, replicas: int) -> Array:
        """Return, by layer, the seconds to transfer activations and gradients at the next cut."""
        sharing = replicas if self.rule == "published-code" else 1
        return 2 * self.cut_nbytes / (level.bandwidth_Bps * sharing)

    def _behind(self, depth: int, behind: Fraction, used: int, replicas: int) -> Fraction:
        """Return `behind` for the components of a stage, if this stage and the earlier stages use
        `used` components of the level."""
        if self.capacity_nbytes is None:
            return Fraction(0)
        workers = math.prod(level.count for level in self.levels[: depth - 1])
        after = (self.levels[depth - 1].count - used) * workers
        return (behind + after) / replicas


def _best_splits(first: int, before_s: Array, stage_s: Array) -> tuple[Array, Array]:
    """Return, for each run of layers from `first` on, the layer before the best cut, and the
    seconds of the slower side.

    `before_s[first, split]` is the time of the part up to the cut, `stage_s[split + 1, last]` the
    time of the part after the cut.
    """
    slower = np.maximum(before_s[first, first:-1, None], stage_s[first + 1 :, first + 1 :])
    nearest = slower.argmin(axis=0)
    return first + nearest, slower[nearest, np.arange(len(nearest))]


def _runs(costs: Sequence[float]) -> Array:
    """Return the summed costs of layers first to last, by [first, last]."""
    ends = np.concatenate([[0.0], np.cumsum(costs)])
    return ends[None, 1:] - ends[:-1, None]


MOST = 64
"""If a level has more components, the replicas of stages after the first are multiples of a unit,
and there are at most `MOST` units."""
FLUSHING = ("1f1b",)
RULES: tuple[SyncRule, ...] = ("text", "published-code")


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions) -> Plan:
    """Return the fastest of PipeDream's plans. Raises `PlanError`."""
    return chosen("pipedream", proposals, costs, cluster, options)


def proposals(priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """Yield the plan of each `SyncRule`, for each schedule and number of micro-batches."""
    options = priced.options
    levels = levels_of(priced, cluster)
    if not options.replicas:
        raise PlanError("the planner pipedream replicates stages: allow replicas, or take another")
    large = is_large(priced, single_device_groups(cluster.ids))
    for count in worth_trying(priced, single_device_groups(cluster.ids)):
        schedules = [name for name in options.among(FLUSHING) if _takes(name, count)]
        if not schedules:
            continue
        table = priced.table(options.size(count)).beside(len(cluster.ids))
        chain = chain_of(table, cluster.ids)
        least = min(table.devices[member].memory_nbytes for member in cluster.ids)
        for rule in RULES[:1] if large else RULES:
            for capacity_nbytes in (None,) if large else (None, least):
                try:
                    stages = plan_pipedream(chain, levels, rule, capacity_nbytes).stages
                except PlanError:
                    continue
                cuts, groups = assign_members(stages, cluster.ids)
                alike = options.data_parallel and len(groups) == 1 and len(groups[0]) > 1
                for schedule in schedules:
                    if alike and rule_of(schedule).flushes:
                        schedule = "data-parallel"
                    yield Proposal(cuts, groups, schedule, count)


def levels_of(priced: Priced, cluster: Cluster) -> list[Level]:
    """Return the cluster's levels; if they are irregular, one level with the slowest link."""
    try:
        return [Level(count, bandwidth_Bps) for count, bandwidth_Bps in cluster.levels()]
    except ClusterError:
        table = next(iter(priced.tables.values()))
        pairs = slowest_pairs(cluster, table.links) or (permutations(cluster.ids, 2),)
        links = [table.link(*pair).bandwidth_Bps for pair in chain.from_iterable(pairs)]
        return [Level(len(cluster.ids), min(links, default=float("inf")))]


def assign_members(
    stages: Sequence[PipeDreamStage], members: Sequence[str]
) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]:
    """Return the cuts, and the members of each stage; stages take the members in order."""
    names = iter(members)
    groups = tuple(tuple(islice(names, stage.replicas)) for stage in stages)
    return tuple(stage.first_layer for stage in stages[1:]), groups


def _takes(schedule: str, microbatches: int) -> bool:
    """Whether stages with replicas can run under the schedule with this number of micro-batches."""
    rule = rule_of(schedule)
    if rule.several_stages or not rule.averages:
        return False
    return rule.flushes or microbatches == 1
