"""DAPPLE's planner: stages, replicas and their places for one global batch (DAPPLE, section 4).

Stages are added from the last to the first. A partial plan is compared with those of the same
first layer and the same devices by what decides the latency of any completion; the best few stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple, get_args

import numpy as np

from hetpipe.cost.published import ChainCosts
from hetpipe.errors import PlanError
from hetpipe.plan.costs import Array
from hetpipe.plan.latency import (
    ADAM,
    DapplePlan,
    DappleStage,
    Formula,
    latency_s,
    overlapped_s,
    pivot_of,
    stage_costs,
)
from hetpipe.plan.placement import Counts, Machines, append_first, numbers, places

WIDTH = 4  # partial plans
MANY = 16  # devices; beyond, the search leaves out replicas and places


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
    that are undominated. On more than 16 devices, replicas are powers of two and stages fill
    server after server. Raises `PlanError` if nothing fits `capacity_nbytes` per device.
    """
    batches = _microbatches(chain, samples, global_batch, formula)
    return _plans(chain, machines, batches, formula, capacity_nbytes, width)[0]


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
    plans = _plans(chain, machines, batches, formula, capacity_nbytes, WIDTH)
    kept = dict.fromkeys(plans[:1])
    for replicas in (machines.devices, 1):
        search = _Search(chain, machines, batches, formula, capacity_nbytes, 1, (replicas,))
        kept |= dict.fromkeys(search.plans()[:1])
    for plan in plans:
        if len(kept) < count:
            kept[plan] = None
    return tuple(sorted(kept, key=lambda plan: plan.latency_s))


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
    """Complete plans, the best first. A coarse search sets the bound for the whole one.

    Raises `PlanError` if nothing fits the capacity.
    """
    powers = [1 << power for power in range(machines.devices.bit_length())]
    replicas = sorted({*powers, machines.devices})
    coarse = _Search(chain, machines, microbatches, formula, capacity_nbytes, 1, replicas).plans()
    bound_s = coarse[0].latency_s if coarse else inf
    plans = _Search(
        chain, machines, microbatches, formula, capacity_nbytes, width, None, bound_s
    ).plans()
    if plans:
        return plans
    raise PlanError(
        f"no plan of {machines.devices} devices fits {capacity_nbytes} bytes per device; the "
        f"model's parameters and Adam's state need {ADAM * sum(chain.params_nbytes)} bytes in "
        "all: give more devices, or smaller micro-batches"
    )


class _Search:
    """The recurrence. Rows of a partial plan: what decides the latency of all its completions.

    FIRST is its first layer, STEADY the pivot's steady phase and the stages before it, TOTAL that
    and the pivot once, END the latency if nothing came before. LATE is how long the all-reduces
    go on after the last backward, should the pivot move. DEPTH counts its stages, NUMBER is its
    last choice.
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
                for group in self._groups(used, replicas)
            ]
            fronts = [(group, self._front(used, group)) for group in groups]
            self.tails[used] = [(group, rows) for group, rows in fronts if rows.size]
        return self.tails[used]

    def _groups(self, used: Counts, replicas: int) -> tuple[Counts, ...]:
        if self.machines.devices > MANY:
            return (append_first(self.machines.counts, used, replicas),)
        return places(self.machines.counts, used, replicas)

    def _front(self, used: Counts, group: Counts) -> Array:
        """Partial plans whose first stage has this group: stages from every layer before."""
        then = tuple(map(sum, zip(used, group, strict=True)))
        layers = len(self.chain.names)
        if then == self.machines.counts:
            behind = np.array([[layers, 0, 0, -inf, -inf, 0, -1]], float).T
        else:
            fronts = self.fronts(then)
            behind = self._best(self._sent(group, fronts)) if fronts else np.empty((7, 0))
        lasts = behind[self.FIRST].astype(int)
        firsts = np.arange(layers) if any(used) else np.zeros(1, int)
        rows, columns = np.nonzero(self._hopeful(firsts, lasts[:, None], used, group))
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
        best = self._best(added[:, fits & (added[self.TOTAL] <= self.bound_s)])
        for column, pair in enumerate(best[self.NUMBER].astype(int)):
            last, parent = int(lasts[rows[pair]]), int(before[self.NUMBER, pair])
            choice = _Choice(int(firsts[pair]), last - 1, used, group, parent)
            best[self.NUMBER, column] = len(self.choices)
            self.choices.append(choice)
        return best

    def _hopeful(self, firsts: Array, lasts: Array, used: Counts, group: Counts) -> Array:
        """Whether stages from `firsts` up to `lasts` may be in a plan as fast as the bound.

        Neither the stage nor the slowest one before it may be too long; some layers and devices
        are left for those before, or none of both.
        """
        compute_s = self.sums[0] + self.sums[1]
        stage_s = (compute_s[lasts] - compute_s[firsts]) / sum(group)
        before_s = compute_s[firsts] / max(sum(used), 1)
        steady_s = (self.microbatches - 1) * np.maximum(stage_s, before_s)
        return (firsts < lasts) & ((firsts > 0) == any(used)) & (steady_s <= self.bound_s)

    def _sent(self, group: Counts, fronts: Sequence[tuple[Counts, Array]]) -> Array:
        """The partial plans of these fronts, each with the transfer from `group` before it."""
        lines = np.array([self.machines.transfer_lines(group, after) for after, _ in fronts])
        lines = lines.repeat([rows.shape[1] for _, rows in fronts], axis=0)
        rows = np.concatenate([rows for _, rows in fronts], axis=1)
        nbytes = self.cut_nbytes[rows[self.FIRST].astype(int)]
        time_s = (lines[:, :, 0] + lines[:, :, 1] * nbytes[:, None]).max(axis=1)
        return self._added(rows, time_s, time_s, np.zeros(len(nbytes)))

    def _added(self, rows: Array, forward: Array, backward: Array, all_reduce: Array) -> Array:
        """Partial plans with one more stage in front (algorithm 1 moves the pivot)."""
        both = forward + backward
        steady = (self.microbatches - 1) * both
        last = rows[self.DEPTH] == 0
        moves = (steady > rows[self.STEADY]) | last
        after = rows[self.END] - rows[self.TOTAL] - backward
        late = rows[self.LATE] - backward
        added = rows.copy()
        added[self.STEADY] = np.where(moves, steady, rows[self.STEADY] + both)
        added[self.TOTAL] = np.where(moves, steady + both, rows[self.TOTAL] + both)
        if self.formula == "printed":
            after = np.where(moves, late - backward, after)
            added[self.LATE] = np.maximum(all_reduce - backward, late)
        else:
            added[self.LATE] = np.maximum(all_reduce, late)
        added[self.END] = added[self.TOTAL] + np.maximum(all_reduce, after)
        return added

    def _best(self, rows: Array) -> Array:
        """Undominated columns, at most `width` per first layer.

        Those stay that may end earliest, with the backwards of all layers before on one device.
        """
        compared = [self.STEADY, self.TOTAL, self.END, self.LATE]
        if self.capacity_nbytes < inf:
            compared.append(self.DEPTH)
        hidden_s = self.sums[1][rows[self.FIRST].astype(int)]
        earliest_s = rows[self.TOTAL] + np.maximum(0.0, rows[self.LATE] - hidden_s)
        rows = rows[:, np.lexsort((rows[self.END], earliest_s, rows[self.FIRST]))]
        kept = []
        for _ in range(self.width):
            if not rows.size:
                break
            first = rows[self.FIRST]
            changes = np.concatenate(([True], first[1:] != first[:-1]))
            leaders = rows[:, changes]
            kept.append(leaders)
            leading = leaders[compared][:, changes.cumsum() - 1]
            rows = rows[:, (rows[compared] < leading - 1e-15).any(axis=0)]
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
    """The replicas that a stage may have: any number, of many devices powers of two, or all."""
    if devices <= MANY:
        return tuple(range(1, devices + 1))
    powers = {1 << power for power in range(devices.bit_length())}
    return tuple(sorted({count for count in powers if count <= devices} | {devices}))
