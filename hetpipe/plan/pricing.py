"""Pricing: makes plans of partitions, or says why they are impossible; predicts timelines."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.plan.costs import StageCosts
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.plan.times import Tied, stage_times
from hetpipe.plan.times import tied as tied_stages
from hetpipe.schedule.generators import generate
from hetpipe.schedule.rule import Rule, rule_of
from hetpipe.schedule.weights import WeightPolicy, policy_of
from hetpipe.simulate.simulator import period_s, simulate
from hetpipe.simulate.timeline import Timeline
from hetpipe.simulate.times import FREE, StageTimes
from hetpipe.simulate.walk import order_of
from hetpipe.words import words

MIB = 2**20
MISSING = "bytes are missing"
"""The words of a reason that more memory would cure."""
NEAR = 1e-3
"""Relative distance below which both bounds of a stream's period count as one price."""
LONGEST = 256
"""Longest stream that is simulated for a price, as a multiple of the mini-batches in flight."""
MOST_REFUSALS = 8
"""Number of devices whose reasons an error lists."""
LONG_TURN = 16
"""Mini-batches; a longer pattern of replicas is assumed to repeat with every mini-batch."""


@dataclass(frozen=True)
class Question:
    """The question that a plan answers: all its inputs except the partition."""

    costs: StageCosts
    schedule: str
    mini_batch: int
    microbatches: int
    weights: str = "flush"

    @cached_property
    def rule(self) -> Rule:
        """The rule of the schedule."""
        return rule_of(self.schedule)

    @cached_property
    def policy(self) -> WeightPolicy:
        """The policy for versions of the weights."""
        return policy_of(self.weights)

    def versions(self, in_flight: Sequence[int], stage: int) -> int:
        """Return how many versions of a stage's weights exist at once, with a predicted copy."""
        return self.policy.versions(in_flight, stage, self.microbatches)


@dataclass(frozen=True)
class Partition:
    """A candidate: the layers of each device."""

    devices: tuple[str, ...]
    cuts: tuple[int, ...]
    in_flight: tuple[int, ...]

    def ends(self, layers: int) -> list[tuple[int, int]]:
        """Return (lo, hi) of each stage."""
        return list(zip((0, *self.cuts), (*self.cuts, layers), strict=True))


def price(question: Question, partition: Partition, origin: str) -> Plan:
    """Return the plan of a partition, with its step predicted by simulation."""
    costs, table = question.costs, question.costs.table
    layers = costs.count
    stages = []
    placed = zip(partition.devices, partition.ends(layers), partition.in_flight, strict=True)
    for number, (device, (lo, hi), in_flight) in enumerate(placed):
        versions = question.versions(partition.in_flight, number)
        forward_s, backward_s, update_s = costs.stage_passes_s(device, lo, hi)
        nbytes = costs.stage_memory_nbytes(lo, hi, in_flight, versions)
        capacity = table.devices[device].memory_nbytes
        stages.append(
            StagePlan(
                lo, hi, (device,), in_flight, forward_s, backward_s, update_s, nbytes, capacity
            )
        )  # fmt: skip
    plan = Plan(
        table.model,
        tuple(layer.name for layer in table.layers),
        tuple(stages),
        question.schedule,
        question.mini_batch,
        question.microbatches,
        step_s=0.0,
        cut_nbytes=tuple(table.layers[cut - 1].cut_nbytes for cut in partition.cuts),
        label=label_of(table, partition.devices),
        origin=origin,
        notes=tuple(_notes(table, partition.devices)),
        weights=question.weights,
        recompute=costs.recompute,
    )
    return replace(plan, step_s=predicted_step_s(plan, table, stage_times(plan, table, True)))


def predicted_step_s(plan: Plan, table: CostTable, times: StageTimes | None = None) -> float:
    """Return the seconds per mini-batch, without a timeline if none is needed.

    Without flushes it is the period of an endless stream. `times` of stages are by default the
    table's.
    """
    times = times or stage_times(plan, table)
    if not plan.rule.flushes:
        return _stream_step_s(plan, table, times)
    pairs = tuple((owner, o) for owner, others in tied_stages(plan, table) for o in others)
    alone = max(plan.replicas) == 1
    if not times.shares_media and (alone or not (plan.rule.several_stages or pairs)):
        order = order_of(
            plan.rule, len(plan.stages), plan.microbatches, plan.in_flight,
            len(set(plan.devices)), pairs,
        )  # fmt: skip
        if order is not None:
            return order.step_s(times if alone else _summed(times)) + times.step_overhead_s
    return predict(plan, table, times=times).total_s


def _stream_step_s(plan: Plan, table: CostTable, times: StageTimes) -> float:
    """Return the period of the plan's stream, at most `NEAR` above the true one.

    The simulated stream grows until its bounds determine the period.
    """
    turn = math.lcm(*plan.replicas)
    if turn > LONG_TURN:  # replicas of a stage have equal costs, so only their sums have a turn
        turn = 1
    reach = _reach(plan)
    rounds = max(4 * -(-reach // turn), -(-_filling(plan) // turn))
    while True:
        timeline = predict(plan, table, times=times, mini_batches=rounds * turn)
        low_s, high_s = period_s(timeline, rounds * turn, turn, reach)
        if high_s - low_s <= NEAR * high_s or rounds * turn > LONGEST * (reach + 1):
            return high_s
        rounds *= 2


def _reach(plan: Plan) -> int:
    """Return the most mini-batches that the plan's stages have in flight."""
    in_flight = (depth * count for depth, count in zip(plan.in_flight, plan.replicas, strict=True))
    return -(-max(in_flight) // plan.microbatches)


def _filling(plan: Plan) -> int:
    """Return a number of mini-batches that fills the pipeline four times."""
    return 4 * _reach(plan) + 4


def _summed(times: StageTimes) -> StageTimes:
    """Return times in which an update includes its sum over replicas.

    A worker with one stage, which shares no parameter, does nothing between the two.
    """
    sums = map(times.sum_of, range(len(times.update_s)))
    both_s = zip(times.update_s, sums, strict=True)
    update_s = tuple(s + (each.latency_s + each.occupancy_s) for s, each in both_s)
    return replace(times, update_s=update_s, all_reduce_s=(), sums=())


def predict(
    plan: Plan,
    table: CostTable,
    *,
    tied: Tied | None = None,
    times: StageTimes | None = None,
    mini_batches: int | None = None,
) -> Timeline:
    """Return the timeline of one step priced by `table`, or of some mini-batches without flushes.

    `mini_batches` is by default a number that fills the pipeline a few times. `tied` are stages
    that share parameters that the table lacks; their transfers cost nothing. `times` of stages are
    by default the table's.
    """
    times = times or stage_times(plan, table)
    pairs = tied_stages(plan, table) if tied is None else tied
    edges = {(a, b) for owner, others in pairs for o in others for a, b in ((owner, o), (o, owner))}
    times = replace(times, tied={**dict.fromkeys(edges, FREE), **times.tied})
    count = 1
    if not plan.rule.flushes:
        count = mini_batches or _filling(plan)
    schedule = generate(
        plan.schedule, len(plan.stages), plan.microbatches, in_flight=plan.in_flight, tied=pairs,
        mini_batches=count, workers=len(set(plan.devices)),
        replicas=plan.replicas,
    )  # fmt: skip
    names = plan.devices
    if not plan.rule.flushes:  # a row for every replica
        names = plan.all_devices
    return simulate(schedule, times, workers=tuple(dict.fromkeys(names)))


def check_able(plan: Plan, table: CostTable) -> None:
    """Raise `PlanError` if a stage has a layer that its device cannot run."""
    for number, stage in enumerate(plan.stages):
        for device in stage.devices:
            why = why_unable(table, device, stage.lo, stage.hi)
            if why is not None:
                raise PlanError(f"stage {number}: {why}")


def why_unable(table: CostTable, device: str, lo: int, hi: int) -> str | None:
    """Name the first of the layers lo..hi that the device cannot run; None if it runs all."""
    refused = _refused(table, device, lo, hi)
    return f"{device} cannot run {refused[0]}" if refused else None


def why_unrunnable(table: CostTable, devices: Sequence[str]) -> str | None:
    """Name the first layer that none of `devices` can run, with the reasons; None if all run."""
    for index, layer in enumerate(table.layers):
        entries = {device: table.devices[device].layers[index] for device in devices}
        if all(entry.impossible for entry in entries.values()):
            refusals = [
                entry.reason if entry.reason.startswith(name) else f"{name}: {entry.reason}"
                for name, entry in entries.items()
            ]
            more = len(refusals) - MOST_REFUSALS
            if more > 0:
                refusals[MOST_REFUSALS:] = [f"{more} more"]
            return (
                f"none of them can run layer {layer.name} ({'; '.join(refusals)}); add a device "
                "that can, or let another backend run its operators (`lends`): "
                "`hetpipe coverage` lists them all"
            )
    return None


def why_impossible(question: Question, partition: Partition) -> str | None:
    """Return why the partition cannot run: an unsupported layer, too little memory, or a parameter
    that two stages would update at different times; None if it can run."""
    costs = question.costs
    if not question.rule.flushes:
        for shared in costs.table.tied:
            if len({bisect_right(partition.cuts, layer) for layer in shared.layers}) > 1:
                return f"cuts {list(partition.cuts)} part layers that share {shared.name}"
    used: dict[str, int] = defaultdict(int)
    capacity: dict[str, int] = defaultdict(int)
    for stage, (lo, hi) in enumerate(partition.ends(costs.count)):
        device = partition.devices[stage]
        cost = costs.table.devices[device]
        domain = cost.memory_domain
        if math.isinf(costs.stage_compute_s(device, lo, hi)):
            first = _refused(costs.table, device, lo, hi)[0]
            return f"{_stage(stage, partition, costs)}: the device cannot run {first}"
        versions = question.versions(partition.in_flight, stage)
        need = costs.stage_memory_nbytes(lo, hi, partition.in_flight[stage], versions)
        used[domain] += need
        capacity[domain] = max(capacity[domain], cost.memory_nbytes)
        if need > cost.memory_nbytes:
            return f"{_stage(stage, partition, costs)} {lack(need, cost.memory_nbytes)}"
        if used[domain] > capacity[domain]:
            return (
                f"{_stage(stage, partition, costs)}, with the stages before it in memory {domain}, "
                f"{lack(used[domain], capacity[domain])}"
            )
    return None


def is_roomy(costs: StageCosts, devices: Sequence[str], in_flight: int, versions: int) -> bool:
    """Whether each device has memory for any stage, beside the devices that share its memory."""
    largest = max(layer.cut_nbytes for layer in costs.table.layers)
    most = costs.memory_nbytes(0, costs.count, in_flight, versions)
    most += (4 + in_flight) * largest  # buffers of two cuts, and inputs that recompute keeps
    members = [costs.table.devices[device] for device in devices]
    sharing = Counter(member.memory_domain for member in members)
    return all(sharing[each.memory_domain] * most <= each.memory_nbytes for each in members)


def _stage(number: int, partition: Partition, costs: StageCosts) -> str:
    lo, hi = partition.ends(costs.count)[number]
    return f"stage {number} (layers {lo}..{hi - 1} on {partition.devices[number]})"


def _notes(table: CostTable, devices: Sequence[str]) -> Iterator[str]:
    """Yield notes on layers that devices cannot run."""
    for device in devices:
        refused = _refused(table, device, 0, len(table.layers))
        if refused:
            more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
            yield f"{device} cannot run {refused[0]}{more}"


def _refused(table: CostTable, device: str, lo: int, hi: int) -> list[str]:
    """Return the layers among lo..hi that the device cannot run, why, and which devices can."""
    costs = table.devices[device].layers
    return [
        f"layer {table.layers[index].name}: {costs[index].reason} ({_able(table, index)})"
        for index in range(lo, hi)
        if costs[index].impossible
    ]


def _able(table: CostTable, index: int) -> str:
    """Name the devices that can run a layer."""
    able = [id for id, device in table.devices.items() if not device.layers[index].impossible]
    return f"{words(able)} can" if able else f"nor can any of {words(table.devices)}"


def lack(need: int, capacity: int) -> str:
    """Describe the bytes that a stage lacks."""
    return (
        f"needs {need} bytes ({need / MIB:.1f} MiB) and has {capacity} ({capacity / MIB:.1f} MiB): "
        f"{need - capacity} {MISSING}"
    )


def label_of(table: CostTable, devices: Sequence[str]) -> str:
    """Return the label of the least certain costs."""
    labels = {table.devices[device].label for device in devices}
    labels |= {table.link(here, there).label for here, there in pairwise(devices)}
    return next((label for label in ("modelled", "emulated") if label in labels), "measured")
