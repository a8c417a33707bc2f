"""The planner: the best partition for given devices, and the best devices and micro-batches.

If there are few partitions (two devices, or a short model), all are candidates. Otherwise two
partitioners propose some, BaPipe's balanced one and the exact one, each counting transfers in two
ways. The simulator chooses, since the slowest stage alone does not determine the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, permutations

from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError, ScheduleError
from hetpipe.plan.costs import Objective, StageCosts
from hetpipe.plan.exact import exact
from hetpipe.plan.interval import with_interval
from hetpipe.plan.partition import balance_cuts, moves
from hetpipe.plan.plan import Plan
from hetpipe.plan.pricing import (
    Partition,
    Question,
    is_roomy,
    lower_bound_s,
    predict,
    price,
    why_impossible,
    why_unrunnable,
)
from hetpipe.schedule.generators import max_in_flight
from hetpipe.words import words

__all__ = ["explore", "make_plan", "predict"]

FREE_ORDER_DEVICES = 4  # up to this number of devices all orders and subsets are tried
FEW = 100  # up to this number of partitions of an order all are candidates
OBJECTIVES: tuple[Objective, ...] = ("sum", "max")  # how partitioners count transfers
GAIN = 1e-9  # a smaller relative gain counts as rounding


def make_plan(
    table: CostTable,
    devices: Sequence[str],
    *,
    mini_batch: int,
    microbatches: int,
    schedule: str = "1f1b",
    cuts: Sequence[int] | None = None,
    fixed_order: bool = False,
    weights: str = "flush",
) -> Plan:
    """Return the plan with the shortest predicted step that puts one stage on each of `devices`.

    Tries every order of up to 4 devices, unless `fixed_order` or `cuts` (layer indices) are given;
    for more devices only the given order. Under 1F1B it also chooses the in-flight depth: one that
    hides transfers if that is faster, a smaller one if memory requires it. `weights` is the policy
    of an asynchronous schedule, which determines the versions kept (`hetpipe.schedule.weights`).

    Raises `PlanError` if there are more devices than layers, or no partition fits.
    """
    costs = StageCosts(table.beside(len(devices)))
    question = Question(costs, schedule, mini_batch, microbatches, weights)
    _check(question, devices)
    if cuts is not None:
        plan = _as_given(question, question.stage_devices(devices), tuple(cuts))
        return with_interval(plan, table)
    free = not fixed_order and len(devices) <= FREE_ORDER_DEVICES
    orders = list(permutations(devices)) if free else [tuple(devices)]
    return with_interval(_best(question, orders), table)


def _best(question: Question, device_orders: Sequence[tuple[str, ...]]) -> Plan:
    """Return the fastest plan with one of these orders of devices. Raises `PlanError`."""
    orders = [question.stage_devices(order) for order in device_orders]
    devices, why = device_orders[0], ""
    best: tuple[Partition, Plan] | None = None
    for depths in _depths(question, len(orders[0])):
        candidates = [
            Partition(order, proposal, depth)
            for order in orders
            for depth in depths
            for proposal in _propose(question, order, depth, OBJECTIVES)
        ]
        quickest = _quickest(question, candidates, "balanced", best)
        if quickest is None:
            why = why or _why_not(question, candidates, orders, depths[0])
        best = quickest
        if best is not None and _is_roomy(question, orders[0], depths):
            break
    if best is None:
        raise PlanError(f"no plan for {words(devices)}: {why}")
    return _improved(question, *best)


def _is_roomy(
    question: Question, devices: Sequence[str], depths: Sequence[tuple[int, ...]]
) -> bool:
    """Whether memory does not restrict the cuts at these depths."""
    versions = max(question.versions(depth, n) for depth in depths for n in range(len(devices)))
    return is_roomy(question.costs, devices, max(map(max, depths)), versions)


def explore(
    tables: Mapping[int, CostTable],
    devices: Sequence[str],
    *,
    mini_batch: int,
    schedules: Sequence[str] = ("gpipe", "1f1b"),
    use_all: bool = False,
    weights: str = "flush",
) -> list[Plan]:
    """Return plans over devices, schedules and micro-batch counts, ranked by predicted step, then
    by memory.

    `tables` has the costs by micro-batch size s; M = ceil(mini_batch / s) if the largest
    micro-batch then has s samples. Tries all subsets of up to 4 devices; of more devices, all of
    them and each alone; with `use_all`, only all. Only the first plan has an interval. Raises
    `PlanError` if no combination works.
    """
    plans: list[Plan] = []
    refused: list[str] = []
    for samples, table in sorted(tables.items()):
        microbatches = -(-mini_batch // samples)
        if -(-mini_batch // microbatches) != samples:
            refused.append(f"micro-batches of {samples} do not divide a mini-batch of {mini_batch}")
            continue
        subsets = [tuple(devices)] if use_all else list(_subsets(devices))
        costs = _costs_by_count(table, subsets)
        for subset in subsets:
            for schedule in schedules:
                try:
                    question = Question(
                        costs[len(subset)], schedule, mini_batch, microbatches, weights
                    )
                    _check(question, subset)
                    free = len(subset) <= FREE_ORDER_DEVICES
                    plans.append(_best(question, list(permutations(subset)) if free else [subset]))
                except (PlanError, ScheduleError) as error:
                    refused.append(str(error))
    if not plans:
        raise PlanError("no plan: " + "; ".join(dict.fromkeys(refused)))
    best, *others = sorted(plans, key=_rank)
    samples = -(-mini_batch // best.microbatches)
    return [with_interval(best, tables[samples]), *others]


def _costs_by_count(table: CostTable, subsets: Sequence[Sequence[str]]) -> dict[int, StageCosts]:
    """Return the costs by number of devices that compute at once; equal costs are shared."""
    beside = {len(subset): table.beside(len(subset)) for subset in subsets}
    costs = {id(one): StageCosts(one) for one in beside.values()}
    return {count: costs[id(one)] for count, one in beside.items()}


def _rank(plan: Plan) -> tuple[float, int]:
    """Return the key of the ranking: the step (rounded), then the memory."""
    return float(f"{plan.step_s:.8e}"), sum(stage.memory_nbytes for stage in plan.stages)


def _subsets(devices: Sequence[str]) -> Iterable[tuple[str, ...]]:
    if len(devices) > FREE_ORDER_DEVICES:
        return [tuple(devices), *((device,) for device in devices)]
    sizes = range(1, len(devices) + 1)
    return [subset for size in sizes for subset in combinations(devices, size)]


def _check(question: Question, devices: Sequence[str]) -> None:
    table = question.costs.table
    if not devices or len(set(devices)) != len(devices):
        raise PlanError(f"devices {list(devices)}: name one or more, each once")
    for device in devices:
        if device not in table.devices:
            there = words(table.devices)
            raise PlanError(f"no costs for {device}; the table of {table.model} has {there}")
    per_device = question.rule.stages_per_worker
    if per_device * len(devices) > len(table.layers):
        raise PlanError(
            f"{per_device * len(devices)} stages need as many layers, {table.model} has "
            f"{len(table.layers)}: use at most {len(table.layers) // per_device} devices"
        )
    if not 1 <= question.microbatches <= question.mini_batch:
        raise PlanError(
            f"a mini-batch of {question.mini_batch} cannot be {question.microbatches} "
            f"micro-batches; choose 1 to {question.mini_batch}"
        )
    samples = -(-question.mini_batch // question.microbatches)
    if samples != table.samples:
        raise PlanError(
            f"{question.microbatches} micro-batches of a mini-batch of {question.mini_batch} have "
            f"{samples} samples, but the costs are for {table.samples}; profile at {samples}"
        )


def _check_cuts(table: CostTable, devices: Sequence[str], cuts: Sequence[int]) -> None:
    ends = [0, *cuts, len(table.layers)]
    if len(cuts) != len(devices) - 1 or sorted(set(ends)) != ends:
        raise PlanError(
            f"cuts {list(cuts)}: {len(devices)} devices need {len(devices) - 1} ascending layer "
            f"indices between 1 and {len(table.layers) - 1}"
        )


def _as_given(question: Question, devices: tuple[str, ...], cuts: tuple[int, ...]) -> Plan:
    """Return the plan of the user's partition; choose only the in-flight depth."""
    _check_cuts(question.costs.table, devices, cuts)
    why: str | None = None
    for depths in _depths(question, len(devices)):
        candidates = [Partition(devices, cuts, depth) for depth in depths]
        quickest = _quickest(question, candidates, "user")
        if quickest is not None:
            return quickest[1]
        why = why_impossible(question, candidates[0])
    raise PlanError(f"no plan for {words(devices)}, cut at {list(cuts)}: {why}")


def _depths(question: Question, stages: int) -> Iterator[list[tuple[int, ...]]]:
    """Yield lists of in-flight depths to choose from; a later list counts only if memory is short.

    1F1B: DAPPLE's P_A and P_B (section 3 there), then P_A with ever lower bounds. Without a flush:
    PipeDream's NOAM, and the depth that hides transfers if the policy is defined for it.
    """
    rule, microbatches = question.rule, question.microbatches
    most = microbatches if rule.flushes else math.inf
    straight = tuple(int(min(stages - stage, most)) for stage in range(stages))
    hiding = tuple(int(min(2 * (stages - stage) - 1, most)) for stage in range(stages))
    both = list(dict.fromkeys([straight, hiding]))
    if not rule.flushes:
        defined = [depths for depths in both if question.policy.has_depth(depths, microbatches)]
        yield defined or [straight]
        return
    if not rule.any_depth:
        workers = stages // rule.stages_per_worker
        rows = rule.rows(stages, microbatches, workers=workers)
        yield [tuple(max_in_flight(rows))]
        return
    yield both
    for bound in range(straight[0] - 1, 0, -1):
        yield [tuple(min(depth, bound) for depth in straight)]


def _propose(
    question: Question,
    order: Sequence[str],
    depth: Sequence[int],
    objectives: Iterable[Objective],
    bounded: bool = True,
) -> list[tuple[int, ...]]:
    """Return cuts that may be best for this order of devices."""
    costs, stages = question.costs, len(order)
    if bounded and math.comb(costs.count - 1, stages - 1) <= FEW:
        return list(combinations(range(1, costs.count), stages - 1))
    whole_s = [float(costs.compute_s(device, 0, costs.count)) for device in order]
    cuts: list[tuple[int, ...]] = []
    for objective in objectives:
        matrices = [
            costs.matrix(
                order, stage, depth[stage], objective, bounded, question.versions(depth, stage)
            )
            for stage in range(stages)
        ]
        best = exact(matrices)
        if best is not None:
            cuts += [best, balance_cuts(matrices, whole_s)]
    return list(dict.fromkeys(cuts))


def _quickest(
    question: Question,
    candidates: Sequence[Partition],
    origin: str,
    best: tuple[Partition, Plan] | None = None,
) -> tuple[Partition, Plan] | None:
    """Return the possible candidate with the shortest step, or `best`; None if none is possible.

    Prices candidates in the order of their lower bounds, until a bound exceeds the best step so
    far: later candidates cannot be faster.
    """
    bounds_s: dict[tuple[tuple[str, ...], tuple[int, ...]], float] = {}  # valid for all depths
    for candidate in candidates:
        key = candidate.devices, candidate.cuts
        if key not in bounds_s:
            bounds_s[key] = lower_bound_s(question, candidate)
    for candidate in sorted(candidates, key=lambda c: bounds_s[c.devices, c.cuts]):
        if best is not None and bounds_s[candidate.devices, candidate.cuts] > best[1].step_s:
            break
        if why_impossible(question, candidate) is not None:
            continue
        plan = price(question, candidate, origin)
        if best is None or _rank(plan) < _rank(best[1]):
            best = (candidate, plan)
    return best


def _improved(question: Question, partition: Partition, plan: Plan) -> Plan:
    """Move boundary layers while the simulated step becomes shorter."""
    layers = question.costs.count
    while True:
        best = None
        for cuts in moves(partition.cuts, layers):
            moved = Partition(partition.devices, cuts, partition.in_flight)
            limit_s = (best[1] if best else plan).step_s * (1 - GAIN)
            if lower_bound_s(question, moved) < limit_s and why_impossible(question, moved) is None:
                priced = price(question, moved, plan.origin)
                if priced.step_s < limit_s:
                    best = (moved, priced)
        if best is None:
            return plan
        partition, plan = best


def _why_not(
    question: Question,
    refused: Sequence[Partition],
    orders: Sequence[tuple[str, ...]],
    depth: tuple[int, ...],
) -> str:
    """Return why no partition fits: the reason for the best one without a memory bound, if any."""
    relaxed = [
        Partition(order, cuts, depth)
        for order in orders
        for cuts in _propose(question, order, depth, ["sum"], bounded=False)
    ]
    if relaxed:
        reasons = (why_impossible(question, partition) for partition in (*relaxed, *refused))
        return next(reason for reason in reasons if reason is not None)
    why = why_unrunnable(question.costs.table, orders[0])
    if why is not None:
        return why
    return "each can run some layers, but in no order of them do these join to the whole model"
