"""DAPPLE's planner: stages, replicas and their places for one global batch (DAPPLE, section 4).

The recurrence of section 4.3 (algorithm 1) adds stages from the last to the first. A partial plan
is compared with the partial plans that have the same first layer and the same devices, by all
values that decide the latency of a complete plan; the best few are kept. All partial plans on the
same devices are computed together, as columns of one array.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from math import inf
from typing import NamedTuple

import numpy as np

from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.errors import PlanError
from hetpipe.plan.chain import check_finite
from hetpipe.plan.costs import Array
from hetpipe.plan.latency import (
    ADAM,
    DapplePlan,
    DappleStage,
    latency_s,
    stage_costs,
)
from hetpipe.plan.server_groups import (
    MANY,
    Counts,
    Machines,
    fewest_stages,
    numbers,
    places,
    powers,
    widths,
)

WIDTH = 4  # partial plans to keep for the same first layer and devices


def candidates(
    chain: ChainCosts,
    machines: Machines,
    *,
    samples: int,
    global_batch: int,
    capacity_nbytes: float | None = None,
    count: int = 8,
) -> tuple[DapplePlan, ...]:
    """Return up to `count` good plans in the order of their latency, to be ranked by simulation.

    A micro-batch has the profile's `samples`. Each of r replicas takes 1 / r of the samples, in
    1 / r of the time. A device keeps 16 bytes per parameter (Adam), and activations of as many
    micro-batches as its stage has in flight by the paper's policy P_A. All plans use all devices.
    Data parallelism and a plan with one device per stage are included if they fit the capacity. The
    first plan is optimal if at most `WIDTH` partial plans per first layer and devices are
    undominated. With more than 16 devices, the numbers of replicas are powers of two, and stages
    fill server after server. With more than 256 devices, small powers are not tried. Raises
    `PlanError` if nothing fits `capacity_nbytes` per device.
    """
    check_finite(chain)
    if samples < 1 or global_batch < samples or global_batch % samples:
        raise PlanError(
            f"a global batch of {global_batch} samples cannot be cut into micro-batches of "
            f"{samples} samples: give 1 sample or more, and a multiple of it as the global batch"
        )
    batches = global_batch // samples
    plans = _plans(chain, machines, batches, capacity_nbytes)
    kept = dict.fromkeys(plans[:1])
    for replicas in (machines.devices, 1):
        search = _Search(chain, machines, batches, capacity_nbytes, 1, (replicas,))
        kept |= dict.fromkeys(search.plans()[:1])
    for plan in plans:
        if len(kept) < count:
            kept[plan] = None
    return tuple(sorted(kept, key=lambda plan: plan.latency_s))


def _plans(
    chain: ChainCosts,
    machines: Machines,
    microbatches: int,
    capacity_nbytes: float | None,
) -> list[DapplePlan]:
    """Return complete plans, the best first.

    Searches that try few numbers of replicas come first, because their plans bound the later
    searches. Raises `PlanError` if nothing fits the capacity.
    """
    replicas = powers(machines.devices)
    bound_s = inf
    for first in reversed(range(len(replicas))):
        coarse = _Search(
            chain, machines, microbatches, capacity_nbytes, 1, replicas[first:], bound_s
        ).plans()
        bound_s = min([bound_s, *(plan.latency_s for plan in coarse[:1])])
    plans = _Search(chain, machines, microbatches, capacity_nbytes, WIDTH, None, bound_s).plans()
    if plans:
        return plans
    raise PlanError(
        f"no plan of {machines.devices} devices fits {capacity_nbytes} bytes per device; the "
        f"model's parameters and Adam's state need {ADAM * sum(chain.params_nbytes)} bytes in "
        "all: give more devices, or smaller micro-batches"
    )


class _Fronts(NamedTuple):
    """Partial plans on the same devices; the row GROUP of `rows` has indices of `groups`."""

    groups: list[Counts]
    rows: Array


class _Choices(NamedTuple):
    """First stages of partial plans on all devices but `used`; arrays have an entry for each
    plan."""

    used: Counts
    groups: list[Counts]
    group: Array
    first: Array
    last: Array
    behind: Array
    """The numbers of the choices for the later stages."""


class _Search:
    """The recurrence. A partial plan is a column of these rows, which decide later latencies.

    FIRST is the partial plan's first layer. STEADY is the time of the pivot's steady phase (see
    `pivot_of`) and of the stages before the pivot, TOTAL is STEADY and the pivot once more, END is
    the latency if no stages are added. LATE is how long the all-reduces continue after the last
    backward if the pivot moves. DEPTH is the number of stages, NUMBER the last choice, GROUP the
    group of devices of the first stage.
    """

    FIRST, STEADY, TOTAL, END, LATE, DEPTH, NUMBER, GROUP = range(8)

    def __init__(
        self,
        chain: ChainCosts,
        machines: Machines,
        microbatches: int,
        capacity_nbytes: float | None,
        width: int,
        replicas: Sequence[int] | None = None,
        bound_s: float = inf,
    ) -> None:
        self.chain, self.machines, self.microbatches = chain, machines, microbatches
        self.width, self.bound_s = width, bound_s * (1 + 1e-9)
        self.capacity_nbytes = inf if capacity_nbytes is None else capacity_nbytes
        self.replicas = replicas or widths(machines.devices)
        costs = (chain.forward_s, chain.backward_s, chain.params_nbytes, chain.activation_nbytes)
        self.sums = np.array([[0.0, *accumulate(values)] for values in costs])
        self.cut_nbytes = np.array([0.0, *chain.cut_nbytes])
        self.lines = cache(machines.transfer_lines)
        # Many devices are used in the order of their numbers, as if all were in one server.
        self.in_order = machines.devices > MANY
        self.counts = (machines.devices,) if self.in_order else machines.counts
        self.fewest = fewest_stages(machines.devices, self.replicas)
        self.starts: list[int] = []  # the number of the first choice in each entry of `choices`
        self.choices: list[_Choices] = []
        self.tails: dict[Counts, _Fronts] = {}

    def plans(self) -> list[DapplePlan]:
        """Return complete plans, the best first."""
        if self.in_order:  # begin with the last devices, so that no call is deep
            for used in reversed(range(1, self.machines.devices)):
                if self._allows(used):
                    self.fronts((used,))
        rows = self.fronts((0,) * len(self.counts)).rows
        ends = rows[:, rows[self.FIRST] == 0][[self.END, self.NUMBER]]
        return [self._plan(int(number)) for _, number in sorted(ends.T.tolist())]

    def fronts(self, used: Counts) -> _Fronts:
        """Return the partial plans on all devices but `used`.

        If all servers have equally many devices, they are interchangeable. Then they are first
        ordered by used devices, the most used server first.
        """
        order = self._order(used)
        if order != sorted(order):
            groups, rows = self.fronts(tuple(used[server] for server in order))
            return _Fronts([_at(order, group) for group in groups], rows)
        if used not in self.tails:
            groups = [
                group
                for replicas in filter(partial(self._allows, sum(used)), self.replicas)
                for group in self._groups(used, replicas)
            ]
            self.tails[used] = _Fronts(groups, self._front(used, groups))
        return self.tails[used]

    def _order(self, used: Counts) -> list[int]:
        """Return the servers, the most used server first; unequal servers keep their order."""
        alike = len(set(self.counts)) == 1
        return sorted(range(len(used)), key=lambda server: -used[server] * alike)

    def _allows(self, used: int, replicas: int = 0) -> bool:
        """Whether there are enough layers for stages on `used` devices, a stage on `replicas`
        devices, and stages on the other devices."""
        left = self.machines.devices - used - replicas
        most = len(self.chain.names) - (replicas > 0)
        return left >= 0 and self.fewest[used] + self.fewest[left] <= most

    def _groups(self, used: Counts, replicas: int) -> tuple[Counts, ...]:
        return ((replicas,),) if self.in_order else places(self.counts, used, replicas)

    def _lines(self, used: Counts, group: Counts, other: Counts) -> tuple[tuple[float, float], ...]:
        """Return the lines of a transfer between two groups, after `used` devices."""
        if self.in_order:
            return self.machines.next_lines(used[0], group[0], other[0])
        return self.lines(group, other)

    def _all_reduce_s(self, nbytes: float, used: Counts, group: Counts) -> float:
        if self.in_order:
            return self.machines.next_all_reduce_s(nbytes, used[0], group[0])
        return self.machines.all_reduce_s(nbytes, group)

    def _front(self, used: Counts, groups: list[Counts]) -> Array:
        """Return partial plans whose first stage is on one of these groups, for any first layer."""
        layers = len(self.chain.names)
        behind = self._behind(used, groups)
        lasts, group = behind[[self.FIRST, self.GROUP]].astype(int)
        firsts = np.arange(layers) if any(used) else np.zeros(1, int)
        counts = np.array([sum(each) for each in groups])
        hopeful = self._hopeful(firsts, lasts[:, None], used, counts[group][:, None])
        rows, columns = np.nonzero(hopeful)
        before, firsts, lasts, group = behind[:, rows], firsts[columns], lasts[rows], group[rows]
        forward, backward, params, saved = self.sums[:, lasts] - self.sums[:, firsts]
        count, part = counts[group], np.array([self.machines.part(int(n)) for n in counts])[group]
        depth = np.minimum(before[self.DEPTH] + 1, self.microbatches)
        fits = ADAM * params + depth * saved / count <= self.capacity_nbytes
        waits, whole = (
            np.array([self._all_reduce_s(nbytes, used, each) for each in groups])
            for nbytes in (0.0, 1.0)
        )
        all_reduce = waits[group] + (whole - waits)[group] * params
        added = self._added(before, part * forward, part * backward, all_reduce)
        added[self.FIRST], added[self.DEPTH] = firsts, before[self.DEPTH] + 1
        added[self.NUMBER] = np.arange(len(rows))
        best = self._best(added[:, fits & (added[self.TOTAL] <= self.bound_s)])
        kept = best[self.NUMBER].astype(int)
        numbers = before[self.NUMBER, kept].astype(int)
        self.starts.append(self.starts[-1] + len(self.choices[-1].first) if self.starts else 0)
        best[self.NUMBER] = self.starts[-1] + np.arange(len(kept))
        chosen = group[kept], firsts[kept], lasts[kept] - 1, numbers
        self.choices.append(_Choices(used, groups, *chosen))
        return best

    def _behind(self, used: Counts, groups: list[Counts]) -> Array:
        """Return the best partial plans on the devices that each of these groups leaves free, with
        the transfer from the group."""
        ends, sent, times_s = [], [], []
        for number, group in enumerate(groups):
            then = tuple(map(sum, zip(used, group, strict=True)))
            if then == self.counts:
                ends.append([len(self.chain.names), 0, 0, -inf, -inf, 0, -1, number])
                continue
            fronts = self.fronts(then)
            if not fronts.rows.size:
                continue
            first, after = fronts.rows[[self.FIRST, self.GROUP]].astype(int)
            lines = np.array([self._lines(used, group, each) for each in fronts.groups])[after]
            nbytes = self.cut_nbytes[first]
            times_s.append((lines[:, :, 0] + lines[:, :, 1] * nbytes[:, None]).max(axis=1))
            rows = fronts.rows.copy()
            rows[self.GROUP] = number
            sent.append(rows)
        last = np.array(ends, float).reshape(-1, 8).T
        if not sent:
            return last
        time_s = np.concatenate(times_s)
        rows = self._added(np.concatenate(sent, axis=1), time_s, time_s, np.zeros(len(time_s)))
        return np.concatenate((last, self._best(rows)), axis=1)

    def _hopeful(self, firsts: Array, lasts: Array, used: Counts, count: Array) -> Array:
        """Return whether stages from `firsts` up to `lasts` may be in a plan as fast as the bound.

        Neither the stage, on `count` devices, nor the slowest earlier stage may take too long. For
        earlier stages both layers and devices must remain, or neither.
        """
        compute_s = self.sums[0] + self.sums[1]
        stage_s = (compute_s[lasts] - compute_s[firsts]) / count
        before_s = compute_s[firsts] / max(sum(used), 1)
        steady_s = (self.microbatches - 1) * np.maximum(stage_s, before_s)
        return (firsts < lasts) & ((firsts > 0) == any(used)) & (steady_s <= self.bound_s)

    def _added(self, rows: Array, forward: Array, backward: Array, all_reduce: Array) -> Array:
        """Return partial plans with one more stage in front (algorithm 1 moves the pivot)."""
        both = forward + backward
        steady = (self.microbatches - 1) * both
        last = rows[self.DEPTH] == 0
        moves = (steady > rows[self.STEADY]) | last
        after = rows[self.END] - rows[self.TOTAL] - backward
        late = rows[self.LATE] - backward
        added = rows.copy()
        added[self.STEADY] = np.where(moves, steady, rows[self.STEADY] + both)
        added[self.TOTAL] = np.where(moves, steady + both, rows[self.TOTAL] + both)
        added[self.LATE] = np.maximum(all_reduce, late)
        added[self.END] = added[self.TOTAL] + np.maximum(all_reduce, after)
        return added

    def _best(self, rows: Array) -> Array:
        """Return undominated columns, at most `width` per first layer and group.

        It keeps the columns that may end earliest if one device runs all earlier layers' backwards.
        """
        compared = [self.STEADY, self.TOTAL, self.END, self.LATE]
        if self.capacity_nbytes < inf:
            compared.append(self.DEPTH)
        hidden_s = self.sums[1][rows[self.FIRST].astype(int)]
        earliest_s = rows[self.TOTAL] + np.maximum(0.0, rows[self.LATE] - hidden_s)
        key = rows[self.GROUP] * (len(self.chain.names) + 1) + rows[self.FIRST]
        order = np.lexsort((rows[self.END], earliest_s, key))
        key, values = key[order], rows[compared][:, order]
        kept = []
        for _ in range(self.width):
            if not order.size:
                break
            changes = np.concatenate(([True], key[1:] != key[:-1]))
            kept.append(order[changes])
            leading = values[:, changes][:, changes.cumsum() - 1]
            better = (values < leading - 1e-15).any(axis=0)
            order, key, values = order[better], key[better], values[:, better]
        return rows[:, np.concatenate(kept)] if kept else rows

    def _plan(self, number: int) -> DapplePlan:
        stages = []
        servers = list(range(len(self.counts)))  # by place in the choice's counts
        while number >= 0:
            block = bisect_right(self.starts, number) - 1
            choices, at = self.choices[block], number - self.starts[block]
            used, group = choices.used, choices.groups[choices.group[at]]
            devices = numbers(self.counts, _at(servers, used), _at(servers, group))
            stages.append(DappleStage(int(choices.first[at]), int(choices.last[at]), devices))
            number = int(choices.behind[at])
            then = tuple(map(sum, zip(used, group, strict=True)))
            servers = [servers[place] for place in self._order(then)]
        costs = stage_costs(self.chain, self.machines, stages)
        return DapplePlan(tuple(stages), latency_s(costs, self.microbatches))


def _at(servers: Sequence[int], counts: Counts) -> Counts:
    """Return `counts` in the order of servers' numbers; `servers` has the number for each count."""
    return tuple(count for _, count in sorted(zip(servers, counts, strict=True)))
