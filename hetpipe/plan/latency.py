"""DAPPLE's estimate of a global batch's latency (DAPPLE, sections 4.1 and 4.3).

Transfers count as stages. This estimate differs from the paper's formula in one point: for a stage
after the pivot, only the backwards of the stages between the pivot and this stage are subtracted
from its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.plan.server_groups import PARTS, Counts, Machines

ADAM = 4  # bytes kept per byte of float32 weights: weights, gradients, two moments (table 7)


@dataclass(frozen=True)
class DappleStage:
    """Layers `first_layer` to `last_layer`, both included, on the devices with these numbers."""

    first_layer: int
    last_layer: int
    devices: tuple[int, ...]


@dataclass(frozen=True)
class DapplePlan:
    """Stages from input to output."""

    stages: tuple[DappleStage, ...]
    latency_s: float


class StageCost(NamedTuple):
    """Seconds of a stage or transfer for one micro-batch, and of the stage's all-reduce."""

    forward_s: float
    backward_s: float
    all_reduce_s: float = 0.0

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s


def pivot_of(stages: Sequence[StageCost], microbatches: float) -> int:
    """Return the stage with the fewest bubbles, which sets the pace (algorithm 1)."""
    pivot = len(stages) - 1
    for stage in reversed(range(pivot)):
        between_s = sum(cost.both_s for cost in stages[stage + 1 : pivot])
        its_s, pivot_s = ((microbatches - 1) * stages[n].both_s for n in (stage, pivot))
        if its_s > pivot_s + between_s:
            pivot = stage
    return pivot


def latency_s(stages: Sequence[StageCost], microbatches: float) -> float:
    """Return the seconds of warm-up, steady phase and end (formulas 1 and 2).

    The steady phase counts without bubbles. The sum is T + H: T is the time until the first stage
    has run its last backward, H = max_s (all-reduce of s - backwards of the stages before s).
    """
    pivot = pivot_of(stages, microbatches)
    ends_s = []
    for number, stage in enumerate(stages):
        if number <= pivot:
            after_s = sum(cost.backward_s for cost in stages[number : pivot + 1])
        else:
            after_s = -sum(cost.backward_s for cost in stages[pivot + 1 : number])
        ends_s.append(stage.all_reduce_s + after_s)
    warmup_s = sum(cost.forward_s for cost in stages[: pivot + 1])
    return warmup_s + (microbatches - 1) * stages[pivot].both_s + max(ends_s)


def stage_costs(
    chain: ChainCosts, machines: Machines, stages: Sequence[DappleStage]
) -> tuple[StageCost, ...]:
    """Return the costs of a plan's stages, and between two stages the cost of their transfer."""
    groups = [_group(machines.counts, stage.devices) for stage in stages]
    costs: list[StageCost] = []
    for number, (stage, group) in enumerate(zip(stages, groups, strict=True)):
        if number:
            nbytes = chain.cut_nbytes[stage.first_layer - 1]
            transfer_s = machines.transfer_s(nbytes, groups[number - 1], group)
            costs.append(StageCost(transfer_s, transfer_s))
        span = slice(stage.first_layer, stage.last_layer + 1)
        part = machines.part(sum(group))
        shares = part * sum(chain.forward_s[span]), part * sum(chain.backward_s[span])
        sum_s = machines.all_reduce_s(sum(chain.params_nbytes[span]), group)
        costs.append(StageCost(*shares, sum_s))
    return tuple(costs)


def overlapped_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    all_reduces_s: Sequence[float],
    accumulated: int,
) -> float:
    """Return the seconds of data parallelism in which gradients are summed during the backward.

    The sum of a layer begins after the layer's last backward. Forward and backward are for a
    device's whole share of the batch, which it computes in `accumulated` parts.
    """
    clock_s = sum(forward_s) + sum(backward_s) * (accumulated - 1) / accumulated
    wire_s = clock_s
    for backward, all_reduce in zip(reversed(backward_s), reversed(all_reduces_s), strict=True):
        clock_s += backward / accumulated
        wire_s = max(wire_s, clock_s) + all_reduce
    return max(clock_s, wire_s)


def _group(counts: Counts, devices: Sequence[int]) -> Counts:
    ends = [*accumulate(counts)]
    found = Counter(bisect_right(ends, device) for device in devices)
    return tuple(found[server] for server in range(len(counts)))


@dataclass(frozen=True)
class PublishedPlan:
    """A plan of the published planner: the replicas of each stage, the first layer of each stage
    but the first, and the estimated latency."""

    replicas: tuple[int, ...]
    cuts: tuple[int, ...]
    latency_s: float


def published_plans(
    chain: ChainCosts, machines: Machines, *, samples: int, global_batch: int
) -> tuple[PublishedPlan, ...]:
    """Return the plans that the authors' program compares, the best first, with its estimates.

    The program has four kinds of plans: data parallelism with overlap, any two stages in
    micro-batches of `samples`, two stages with half of the devices each whose replicas have
    `samples` each, and one device per stage. The last two kinds are cut for the shortest block: a
    block is the slowest stage, or the slowest round trip across a cut. All but the first kind take

        latency = (M - 1) block + one micro-batch on one device + transfers + late all-reduces

    With more than 256 devices, not every division between two stages is tried. Stages get the
    devices in the order of their numbers. A transfer to a group on several servers counts at the
    speed of an all-reduce; r devices of one server sum in r / 2 rings.
    """
    planner = _Published(chain, machines, samples, global_batch)
    plans = [planner.parallel(), *planner.two_stages()]
    layers, devices = len(chain.names), machines.devices
    if layers >= 2 and devices % 2 == 0 and global_batch >= samples * devices // 2:
        plans.append(planner.even(2))
    if layers >= devices > 2:
        plans.append(planner.even(devices))
    return tuple(sorted(plans, key=lambda plan: plan.latency_s))


class _Published:
    def __init__(
        self, chain: ChainCosts, machines: Machines, samples: int, global_batch: int
    ) -> None:
        self.chain, self.machines = chain, machines
        self.microbatches = global_batch / samples
        times_s = [sum(pair) for pair in zip(chain.forward_s, chain.backward_s, strict=True)]
        self.compute_s = [0.0, *accumulate(times_s)]
        self.params = [0, *accumulate(chain.params_nbytes)]
        self.server_begins = [0, *accumulate(machines.counts)]
        self.server_of = [
            server for server, count in enumerate(machines.counts) for _ in range(count)
        ]

    def parallel(self) -> PublishedPlan:
        devices = self.machines.devices
        share = self.microbatches / devices
        sums_s = [self._sum_s(range(devices), nbytes) for nbytes in self.chain.params_nbytes]
        forward_s = [share * time_s for time_s in self.chain.forward_s]
        backward_s = [share * time_s for time_s in self.chain.backward_s]
        return PublishedPlan((devices,), (), overlapped_s(forward_s, backward_s, sums_s, 1))

    def two_stages(self) -> Iterator[PublishedPlan]:
        devices = self.machines.devices
        step = -(-devices // PARTS)
        for replicas in range(step, devices, step):
            groups = range(replicas), range(replicas, devices)
            for cut in range(1, len(self.chain.names)):
                sent_s = self._sent_s(groups[0], groups[1], self.chain.cut_nbytes[cut - 1])
                stages_s = self.compute_s[cut], self.compute_s[-1] - self.compute_s[cut]
                block_s = max(sent_s, stages_s[0] / replicas, stages_s[1] / (devices - replicas))
                latency_s = self._latency_s(groups, (cut,), block_s, self.microbatches)
                yield PublishedPlan((replicas, devices - replicas), (cut,), latency_s)

    def even(self, stages: int) -> PublishedPlan:
        """Return the plan with equal numbers of devices per stage and the shortest block."""
        replicas = self.machines.devices // stages
        groups = [range(n * replicas, (n + 1) * replicas) for n in range(stages)]
        layers = len(self.chain.names)
        best: list[tuple[float, tuple[int, ...]]] = [(time_s, ()) for time_s in self.compute_s]
        for number in range(1, stages):
            pair = groups[number - 1], groups[number]
            sent_s = [0.0] + [
                self._sent_s(*pair, 2 * replicas * nbytes) for nbytes in self.chain.cut_nbytes
            ]
            best = [
                min(
                    (
                        (
                            max(
                                best[cut][0], sent_s[cut], self.compute_s[end] - self.compute_s[cut]
                            ),
                            (*best[cut][1], cut),
                        )
                        for cut in range(number, end)
                    ),
                    default=(inf, ()),
                )
                for end in range(layers + 1)
            ]
        block_s, cuts = best[layers]
        latency_s = self._latency_s(groups, cuts, block_s, self.microbatches / replicas)
        return PublishedPlan((replicas,) * stages, cuts, latency_s)

    def _latency_s(
        self, groups: Sequence[range], cuts: tuple[int, ...], block_s: float, microbatches: float
    ) -> float:
        ends = (0, *cuts, len(self.chain.names))
        late_s = 0.0
        for number, group in enumerate(groups):
            nbytes = self.params[ends[number + 1]] - self.params[ends[number]]
            late_s = max(late_s, self._sum_s(group, nbytes) - number * block_s)
        transfers_s = sum(
            self._sent_s(*pair, self.chain.cut_nbytes[cut - 1])
            for pair, cut in zip(pairwise(groups), cuts, strict=True)
        )
        return (microbatches - 1) * block_s + self.compute_s[-1] + transfers_s + late_s

    def _sum_s(self, group: range, nbytes: float) -> float:
        moved = 2 * (len(group) - 1) / len(group) * nbytes
        if self._servers(group) > 1:
            return moved / self.machines.between.all_reduce_Bps
        return moved / self.machines.inside.all_reduce_Bps / max(len(group) // 2, 1)

    def _sent_s(self, source: range, target: range, nbytes: float) -> float:
        home = self.server_of[target[0]]
        if self._servers(target) > 1:
            return nbytes / self.machines.between.all_reduce_Bps
        begin, end = self.server_begins[home], self.server_begins[home + 1]
        inside = max(min(source.stop, end) - max(source.start, begin), 0)
        outside = (len(source) - inside) / len(source)
        if outside:
            return outside * nbytes / self.machines.between.p2p_Bps
        return nbytes / self.machines.inside.p2p_Bps

    def _servers(self, group: range) -> int:
        return self.server_of[group[-1]] - self.server_of[group[0]] + 1
