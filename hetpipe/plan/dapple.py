"""DAPPLE's planner: stages, replicas and their places for one global batch (DAPPLE, section 4).

Stages are added from the last to the first. A partial plan is compared with those of the same
first layer and the same devices by what decides the latency of any completion; the best few stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, NamedTuple, get_args

import numpy as np

from hetpipe.cost.published import ChainCosts
from hetpipe.errors import PlanError
from hetpipe.plan.costs import Array
from hetpipe.plan.latency import Formula, StageCost, latency_s, overlapped_s, pivot_of
from hetpipe.plan.placement import Counts, Machines, numbers, places

Depth = Literal["P_A", "P_B"]
WIDTH = 4
ADAM = 4  # bytes kept per byte of float32 weights: weights, gradients, two moments (table 7)


@dataclass(frozen=True)
class DappleStage:
    """Layers `first_layer` to `last_layer`, both included, on `devices`, by their numbers."""

    first_layer: int
    last_layer: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class DapplePlan:
    """Stages from input to output. `pivot` counts stages and the transfers between them."""

    stages: tuple[DappleStage, ...]
    pivot: int
    latency_s: float
    formula: Formula
    microbatches: int

    @property
    def replicas(self) -> tuple[int, ...]:
        return tuple(len(stage.devices) for stage in self.stages)

    def in_flight(self, policy: Depth = "P_A") -> tuple[int, ...]:
        """Forwards with which each stage starts (section 5.3)."""
        left = range(len(self.stages), 0, -1)
        deep = left if policy == "P_A" else [2 * stages - 1 for stages in left]
        return tuple(min(depth, self.microbatches) for depth in deep)


class _Choice(NamedTuple):
    """A stage of a partial plan, and the number of the choice for the stages behind it."""

    first: int
    last: int
    used: Counts
    group: Counts
    behind: int


def plan_dapple(
    chain: ChainCosts,
    machines: Machines,
    *,
    samples: int,
    global_batch: int,
    formula: Formula = "corrected",
    capacity_nbytes: float | None = None,
    width: int = WIDTH,
) -> DapplePlan:
    """The plan with the lowest estimated latency, whose devices are all used.

    A micro-batch has the profile's `samples`; r replicas take 1 / r of it each, in 1 / r of its
    times. A device keeps Adam's 16 bytes a parameter and the activations of P_A's micro-batches.
    `width` partial plans stay per layer and devices; the plan is the best one while no more than
    that are undominated. Raises `PlanError` if nothing fits `capacity_nbytes` per device.
    """
    batches = _microbatches(chain, samples, global_batch, formula)
    plans = _plans(chain, machines, batches, formula, capacity_nbytes, width)
    if plans:
        return plans[0]
    raise PlanError(
        f"no plan of {machines.devices} devices fits {capacity_nbytes:g} bytes per device; the "
        f"model's parameters and Adam's state need {ADAM * sum(chain.params_nbytes)} bytes in "
        "all: give more devices, or smaller micro-batches"
    )


def candidates(
    chain: ChainCosts,
    machines: Machines,
    *,
    samples: int,
    global_batch: int,
    formula: Formula = "corrected",
    capacity_nbytes: float | None = None,
    count: int = 8,
) -> tuple[DapplePlan, ...]:
    """Up to `count` good plans in the order of their latency, to be ranked by simulation.

    Data parallelism and one device a stage are among them, or what of both fits the capacity.
    Raises `PlanError` as `plan_dapple` does.
    """
    batches = _microbatches(chain, samples, global_batch, formula)
    best = plan_dapple(
        chain,
        machines,
        samples=samples,
        global_batch=global_batch,
        formula=formula,
        capacity_nbytes=capacity_nbytes,
    )
    always = [best]
    for replicas in (machines.devices, 1):
        search = _Search(chain, machines, batches, formula, capacity_nbytes, 1, (replicas,))
        always += search.plans()[:1]
    kept = dict.fromkeys(always)
    for plan in _plans(chain, machines, batches, formula, capacity_nbytes, WIDTH):
        if len(kept) >= count:
            break
        kept[plan] = None
    return tuple(sorted(kept, key=lambda plan: plan.latency_s))


def stage_costs(
    chain: ChainCosts, machines: Machines, stages: Sequence[DappleStage]
) -> tuple[StageCost, ...]:
    """The costs of a plan's stages and, between them, of its transfers."""
    groups = [_group(machines.counts, stage.devices) for stage in stages]
    costs: list[StageCost] = []
    for number, (stage, group) in enumerate(zip(stages, groups, strict=True)):
        if number:
            nbytes = chain.cut_nbytes[stage.first_layer - 1]
            transfer_s = machines.transfer_s(nbytes, groups[number - 1], group)
            costs.append(StageCost(transfer_s, transfer_s))
        span = slice(stage.first_layer, stage.last_layer + 1)
        shares = (sum(chain.forward_s[span]) / sum(group), sum(chain.backward_s[span]) / sum(group))
        sum_s = machines.all_reduce_s(sum(chain.params_nbytes[span]), group)
        costs.append(StageCost(*shares, sum_s))
    return tuple(costs)


def stage_memory_nbytes(chain: ChainCosts, plan: DapplePlan) -> tuple[float, ...]:
    """What a device of each stage keeps: Adam's state, and activations of P_A in flight."""
    kept = []
    for stage, depth in zip(plan.stages, plan.in_flight(), strict=True):
        span = slice(stage.first_layer, stage.last_layer + 1)
        saved = depth * sum(chain.activation_nbytes[span]) / len(stage.devices)
        kept.append(ADAM * sum(chain.params_nbytes[span]) + saved)
    return tuple(kept)


def overlapped_data_parallel_s(
    chain: ChainCosts,
    machines: Machines,
    *,
    samples: int,
    global_batch: int,
    capacity_nbytes: float | None = None,
) -> float:
    """Data parallelism with gradient accumulation and overlap: as few parts as fit the capacity.

    A layer's sum begins after its last backward, one sum at a time. Returns infinity where the
    parameters alone do not fit.
    """
    _microbatches(chain, samples, global_batch, "corrected")
    share = global_batch / samples / machines.devices
    accumulated = 1
    if capacity_nbytes is not None:
        room = capacity_nbytes - ADAM * sum(chain.params_nbytes)
        if room <= 0:
            return inf
        accumulated = max(1, int(-(-share * sum(chain.activation_nbytes) // room)))
    return overlapped_s(
        [share * time_s for time_s in chain.forward_s],
        [share * time_s for time_s in chain.backward_s],
        [machines.all_reduce_s(nbytes, machines.counts) for nbytes in chain.params_nbytes],
        accumulated,
    )


def _microbatches(chain: ChainCosts, samples: int, global_batch: int, formula: str) -> int:
    if not chain.names:
        raise PlanError("the chain has 0 layers; give 1 or more")
    if formula not in get_args(Formula):
        raise PlanError(
            f"there is no formula {formula!r}; take one of {', '.join(get_args(Formula))}"
        )
    if samples < 1 or global_batch < samples or global_batch % samples:
        raise PlanError(
            f"a global batch of {global_batch} is not cut into micro-batches of {samples} samples: "
            "give a multiple"
        )
    return global_batch // samples


def _plans(
    chain: ChainCosts,
    machines: Machines,
    microbatches: int,
    formula: Formula,
    capacity_nbytes: float | None,
    width: int,
) -> list[DapplePlan]:
    """Complete plans, the best first. A coarse search sets the bound for the whole one."""
    powers = [1 << power for power in range(machines.devices.bit_length())]
    replicas = sorted({*powers, machines.devices})
    coarse = _Search(chain, machines, microbatches, formula, capacity_nbytes, 1, replicas).plans()
    bound_s = coarse[0].latency_s if coarse else inf
    return _Search(
        chain, machines, microbatches, formula, capacity_nbytes, width, None, bound_s
    ).plans()


def _group(counts: Counts, devices: Sequence[int]) -> Counts:
    ends = [0, *accumulate(counts)]
    return tuple(sum(lo <= device < hi for device in devices) for lo, hi in pairwise(ends))


class _Search:
    """The recurrence. Rows of a partial plan: what decides the latency of all its completions.

    FIRST its first layer, STEADY the pivot's steady phase and the stages before it, TOTAL that
    and the pivot once, END the latency if nothing came before, LATE the same of the all-reduces
    alone if the pivot moved on (`printed`), DEPTH its stages, NUMBER its last choice.
    """

    FIRST, STEADY, TOTAL, END, LATE, DEPTH, NUMBER = range(7)

    def __init__(
        self,
        chain: ChainCosts,
        machines: Machines,
        microbatches: int,
        formula: Formula,
        capacity_nbytes: float | None,
        width: int,
        replicas: Sequence[int] | None = None,
        bound_s: float = inf,
    ) -> None:
        self.chain, self.machines, self.microbatches = chain, machines, microbatches
        self.formula, self.width, self.bound_s = formula, width, bound_s * (1 + 1e-9)
        self.capacity_nbytes = inf if capacity_nbytes is None else capacity_nbytes
        self.replicas = replicas or _widths(machines.devices)
        costs = (chain.forward_s, chain.backward_s, chain.params_nbytes, chain.activation_nbytes)
        self.sums = np.array([[0.0, *accumulate(values)] for values in costs])
        self.cut_nbytes = np.array([0.0, *chain.cut_nbytes])
        self.choices: list[_Choice] = []
        self.tails: dict[Counts, list[tuple[Counts, Array]]] = {}

    def plans(self) -> list[DapplePlan]:
        """Complete plans, the best first."""
        fresh = (0,) * len(self.machines.counts)
        ends = [
            (float(end), int(number))
            for _, rows in self.fronts(fresh)
            for first, end, number in rows[[self.FIRST, self.END, self.NUMBER]].T
            if first == 0
        ]
        return [self._plan(number) for _, number in sorted(ends)]

    def fronts(self, used: Counts) -> list[tuple[Counts, Array]]:
        """The partial plans on all devices but `used`, by the group of their first stage."""
        if used not in self.tails:
            left = self.machines.devices - sum(used)
            groups = [
                group
                for replicas in self.replicas
                if replicas <= left
                for group in places(self.machines.counts, used, replicas)
            ]
            fronts = [(group, self._front(used, group)) for group in groups]
            self.tails[used] = [(group, rows) for group, rows in fronts if rows.size]
        return self.tails[used]

    def _front(self, used: Counts, group: Counts) -> Array:
        """Partial plans whose first stage has this group: stages from every layer before."""
        then = tuple(map(sum, zip(used, group, strict=True)))
        layers = len(self.chain.names)
        if then == self.machines.counts:
            behind = np.array([[layers, 0, 0, -inf, -inf, 0, -1]], float).T
        else:
            parts = [self._sent(group, after, rows) for after, rows in self.fronts(then)]
            behind = self._best(np.concatenate(parts, axis=1)) if parts else np.empty((7, 0))
        lasts = behind[self.FIRST].astype(int)
        firsts = np.arange(layers) if any(used) else np.zeros(1, int)
        rows, columns = np.nonzero(firsts < lasts[:, None])
        firsts = firsts[columns]
        before = behind[:, rows]
        forward, backward, params, saved = self.sums[:, lasts[rows]] - self.sums[:, firsts]
        count = sum(group)
        depth = np.minimum(before[self.DEPTH] + 1, self.microbatches)
        fits = ADAM * params + depth * saved / count <= self.capacity_nbytes
        sum_s = self.machines.all_reduce_s(1.0, group) - self.machines.all_reduce_s(0.0, group)
        all_reduce = self.machines.all_reduce_s(0.0, group) + sum_s * params
        added = self._added(before, forward / count, backward / count, all_reduce)
        added[self.FIRST], added[self.DEPTH] = firsts, before[self.DEPTH] + 1
        added[self.NUMBER] = np.arange(len(rows))
        best = self._best(added[:, fits & self._hopeful(added, used)])
        for column, pair in enumerate(best[self.NUMBER].astype(int)):
            last, parent = int(lasts[rows[pair]]), int(before[self.NUMBER, pair])
            choice = _Choice(int(firsts[pair]), last - 1, used, group, parent)
            best[self.NUMBER, column] = len(self.choices)
            self.choices.append(choice)
        return best

    def _hopeful(self, rows: Array, used: Counts) -> Array:
        """Whether a completion may be as fast as the bound: its work is shared by `used` at best."""
        firsts = rows[self.FIRST].astype(int)
        work_s = (self.sums[0] + self.sums[1])[firsts] / max(sum(used), 1)
        steady_s = np.maximum(rows[self.STEADY], (self.microbatches - 1) * work_s)
        paces_s = np.maximum(rows[self.TOTAL], np.where(firsts > 0, rows[self.STEADY] + work_s, 0))
        paces_s = np.maximum(paces_s, np.where(firsts > 0, steady_s, 0))
        possible = (firsts == 0) == (sum(used) == 0)
        return possible & (paces_s <= self.bound_s)

    def _sent(self, group: Counts, after: Counts, rows: Array) -> Array:
        """The transfer from `group` before partial plans that begin on `after`."""
        base_s = self.machines.transfer_s(0.0, group, after)
        byte_s = self.machines.transfer_s(1.0, group, after)
        nbytes = self.cut_nbytes[rows[self.FIRST].astype(int)]
        if base_s:
            time_s = np.array([self.machines.transfer_s(n, group, after) for n in nbytes])
        else:
            time_s = byte_s * nbytes
        return self._added(rows, time_s, time_s, np.zeros(len(nbytes)))

    def _added(self, rows: Array, forward: Array, backward: Array, all_reduce: Array) -> Array:
        """Partial plans with one more stage in front (algorithm 1 moves the pivot)."""
        both = forward + backward
        steady = (self.microbatches - 1) * both
        last = rows[self.DEPTH] == 0
        moves = (steady > rows[self.STEADY]) | last
        late = rows[self.LATE] - backward
        after = rows[self.END] - rows[self.TOTAL] - backward
        if self.formula == "printed":
            after = np.where(moves, late - backward, after)
        added = rows.copy()
        added[self.STEADY] = np.where(moves, steady, rows[self.STEADY] + both)
        added[self.TOTAL] = np.where(moves, steady + both, rows[self.TOTAL] + both)
        added[self.END] = added[self.TOTAL] + np.maximum(all_reduce, after)
        if self.formula == "printed":
            added[self.LATE] = np.maximum(all_reduce - backward, late)
        return added

    def _best(self, rows: Array) -> Array:
        """Undominated columns, at most `width` per first layer: those with the earliest ends."""
        compared = [self.STEADY, self.TOTAL, self.END]
        if self.formula == "printed":
            compared.append(self.LATE)
        if self.capacity_nbytes < inf:
            compared.append(self.DEPTH)
        rows = rows[:, np.lexsort((*rows[compared[::-1]], rows[self.END], rows[self.FIRST]))]
        kept = []
        for _ in range(self.width):
            if not rows.size:
                break
            first = rows[self.FIRST]
            starts = np.flatnonzero(np.diff(first, prepend=-1.0))
            kept.append(rows[:, starts])
            nearest = np.repeat(starts, np.diff(starts, append=len(first)))
            beaten = (rows[compared] >= rows[compared][:, nearest] - 1e-15).all(axis=0)
            rows = rows[:, ~beaten]
        return np.concatenate(kept, axis=1) if kept else rows

    def _plan(self, number: int) -> DapplePlan:
        stages = []
        while number >= 0:
            choice = self.choices[number]
            devices = numbers(self.machines.counts, choice.used, choice.group)
            stages.append(DappleStage(choice.first, choice.last, devices))
            number = choice.behind
        costs = stage_costs(self.chain, self.machines, stages)
        estimate_s = latency_s(costs, self.microbatches, self.formula)
        pivot = pivot_of(costs, self.microbatches)
        return DapplePlan(tuple(stages), pivot, estimate_s, self.formula, self.microbatches)


def _widths(devices: int) -> tuple[int, ...]:
    """The replicas that a stage may have: any number up to 16 devices, then powers of two."""
    if devices <= 16:
        return tuple(range(1, devices + 1))
    powers = {1 << power for power in range(devices.bit_length())}
    return tuple(sorted({count for count in powers if count <= devices} | {devices}))
