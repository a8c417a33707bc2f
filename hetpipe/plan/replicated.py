"""Replicated plans: replicas of the whole model, or of stages, divide rows by their speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, isinf

import numpy as np

from hetpipe.cost.between import with_sizes_between
from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.plan.costs import StageCosts
from hetpipe.plan.interval import with_interval
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.plan.pricing import (
    check_able,
    label_of,
    predict,
    predicted_step_s,
    why_unable,
)
from hetpipe.plan.shares import all_reduce_s, divide_samples
from hetpipe.plan.times import stage_times
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.schedule.rule import rule_of
from hetpipe.schedule.turns import noam
from hetpipe.schedule.weights import policy_of
from hetpipe.words import words

BEYOND = 1.25
"""How far beyond the largest measured micro-batch times are extrapolated, as a factor."""


def replicated_plan(
    tables: Mapping[int, CostTable],
    devices: Sequence[str],
    cuts: Sequence[int] = (),
    *,
    mini_batch: int,
    microbatches: int | None = None,
) -> Plan:
    """Return the fastest predicted plan with the whole model on each of `devices`.

    A step is the slowest replica's passes, an all-reduce and an update; with `cuts` the gradients
    of a stage are summed while earlier stages compute. `tables` are by micro-batch size; times of
    other sizes are interpolated. Raises `PlanError` if no numbers of rows are within the measured
    sizes, a device cannot run the model, or cuts do not fit it.
    """
    table = next(iter(tables.values()))
    layers = len(table.layers)
    _check([devices] * (len(cuts) + 1), cuts, layers)
    for device in devices:
        if device in table.devices and (why := why_unable(table, device, 0, layers)) is not None:
            raise PlanError(f"no data-parallel plan for {words(devices)}: {why}")
    tables = {size: table.beside(len(devices)) for size, table in tables.items()}
    most = mini_batch // max(len(devices), 1)  # a row for each device
    counts = [microbatches] if microbatches else [2**k for k in range(most.bit_length())]
    plans = [
        plan
        for count in counts
        for plan in [_with(tables, tuple(devices), cuts, mini_batch, count)]
        if plan is not None
    ]
    if len(devices) < 2 or not plans:
        raise PlanError(
            f"no data-parallel plan for {words(devices) or 'no device'}: there must be two or "
            f"more, and their shares of a mini-batch of {mini_batch} must be between the measured "
            f"sizes {min(tables)} and {max(tables)}; profile others, or use a pipeline"
        )
    return _finished(min(plans, key=lambda plan: plan.step_s), tables)


def replicated_again(tables: Mapping[int, CostTable], plan: Plan) -> Plan:
    """Return a plan of `replicated_plan` with the same shares, priced by these tables.

    Raises `PlanError` if its sizes are outside the measured ones, or it does not fit.
    """
    devices = plan.stages[0].devices
    tables = {size: table.beside(len(devices)) for size, table in tables.items()}
    rows = {
        device: round(share) for device, share in zip(devices, plan.stages[0].shares, strict=True)
    }
    again = _with(tables, devices, plan.cuts, plan.mini_batch, plan.microbatches, rows)
    if again is None:
        raise PlanError(
            f"shares of {words(rows.values())} rows are beyond the measured sizes "
            f"{min(tables)} to {max(tables)}: profile others"
        )
    return _finished(again, tables)


def _finished(plan: Plan, tables: Mapping[int, CostTable]) -> Plan:
    check_able(plan, next(iter(tables.values())))
    nearest = min(tables, key=lambda size: abs(size - plan.share_samples))
    return with_interval(plan, tables[nearest])


@dataclass(frozen=True)
class Passes:
    """How stages run a mini-batch. An empty `in_flight` means the schedule's default."""

    schedule: str
    microbatches: int
    weights: str = "flush"
    in_flight: tuple[int, ...] = ()
    recompute: bool = False
    rows: Sequence[Sequence[int]] = ()
    """Rows of a micro-batch by stage and replica; empty: by the devices' speeds."""


def staged_plan(
    tables: Mapping[int, CostTable],
    groups: Sequence[Sequence[str]],
    cuts: Sequence[int],
    passes: Passes,
    *,
    mini_batch: int,
) -> Plan:
    """Return the plan whose stages, between these cuts, have these devices as replicas.

    Replicas divide micro-batches by their speed; without flushes they take turns, and the slowest
    one's time counts. `tables` are by size, for whole micro-batches and replicas' parts. Raises
    `PlanError`.
    """
    schedule, microbatches = passes.schedule, passes.microbatches
    samples = -(-mini_batch // microbatches)
    count = len({device for group in groups for device in group})
    tables = {size: table.beside(count) for size, table in tables.items()}
    table = tables[max(tables)]
    layers = len(table.layers)
    _check(groups, cuts, layers)
    asynchronous = not rule_of(schedule).flushes
    replicas = [len(group) for group in groups]
    if passes.in_flight:
        depths = list(passes.in_flight)
    else:
        depths = noam(replicas) if asynchronous else _depths(schedule, len(groups), microbatches)
    policy = policy_of(passes.weights)
    stages = []
    for number, (group, lo, hi) in enumerate(zip(groups, (0, *cuts), (*cuts, layers), strict=True)):
        if unable := next(filter(None, (why_unable(table, d, lo, hi) for d in group)), None):
            raise PlanError(f"stage {number}: {unable}")
        times = _times_of(tables, group, lo, hi, passes.recompute)
        if passes.rows:
            rows = dict(zip(group, passes.rows[number], strict=True))
        else:
            rows = dict.fromkeys(group, samples) if asynchronous else _rows(times, samples)
        versions = policy.versions(depths, number, microbatches)
        stages.append(_stage(tables, times, rows, _Span(lo, hi, depths[number], versions)))
    plan = Plan(
        table.model,
        tuple(layer.name for layer in table.layers),
        tuple(stages),
        schedule,
        mini_batch,
        microbatches,
        0.0,
        tuple(table.layers[cut - 1].cut_nbytes for cut in cuts),
        label_of(table, [device for group in groups for device in group]),
        "user",
        weights=passes.weights,
        recompute=passes.recompute,
    )
    priced_s = predicted_step_s(plan, table, stage_times(plan, table, as_planned=True))
    return with_interval(replace(plan, step_s=priced_s), table)


def _check(groups: Sequence[Sequence[str]], cuts: Sequence[int], layers: int) -> None:
    ends = [0, *cuts, layers]
    if len(groups) != len(cuts) + 1 or sorted(set(ends)) != ends:
        raise PlanError(
            f"{len(groups)} stages and cuts {list(cuts)}: give a cut between each two, ascending "
            f"within 1..{layers - 1}"
        )
    if min(map(len, groups)) < 1:
        raise PlanError(
            f"replicas {[len(group) for group in groups]}: each stage needs one or more"
        )


def _depths(schedule: str, stages: int, microbatches: int) -> list[int]:
    return max_in_flight(generate(schedule, stages, microbatches))


@dataclass(frozen=True)
class _Span:
    """Layers lo..hi (hi excluded) of a stage, its forwards in flight and versions of weights."""

    lo: int
    hi: int
    in_flight: int = 1
    versions: int = 1


def _stage(
    tables: Mapping[int, CostTable],
    times: Mapping[str, _Times],
    rows: Mapping[str, int],
    span: _Span,
) -> StagePlan:
    """Return a stage on the devices of `times`, each with its number of rows of a micro-batch."""
    devices, lo, hi = tuple(times), span.lo, span.hi
    most = max(rows.values())
    between = with_sizes_between(tables, [most])
    table = between[min(between, key=lambda size: abs(size - most))]
    slowest = max(devices, key=lambda device: sum(times[device].at(rows[device])))
    forward_s, backward_s = times[slowest].at(rows[slowest])
    costs = StageCosts(table, times[slowest].recompute)
    return StagePlan(
        lo, hi, devices, span.in_flight, forward_s, backward_s,
        max(table.update_s(device, lo, hi) for device in _one_of_each_kind(table, devices)),
        int(costs.memory_nbytes(lo, hi, span.in_flight, span.versions)),
        min(table.devices[device].memory_nbytes for device in devices),
        tuple(float(rows[device]) for device in devices),
        all_reduce_s(table, devices, lo, hi) if len(devices) > 1 else 0.0,
    )  # fmt: skip


def _with(
    tables: Mapping[int, CostTable],
    devices: tuple[str, ...],
    cuts: Sequence[int],
    mini_batch: int,
    microbatches: int,
    rows: Mapping[str, int] | None = None,
) -> Plan | None:
    """Return the plan with these micro-batches; None if their sizes were not measured.

    `rows` are the rows of a micro-batch for each device, by default the fastest division.
    """
    samples = -(-mini_batch // microbatches)
    layers = len(next(iter(tables.values())).layers)
    times = _times_of(tables, devices, 0, layers)
    rows = rows or _rows(times, samples)
    if not all(times[device].knows(count) for device, count in rows.items()):
        return None
    stages = []
    for lo, hi in zip((0, *cuts), (*cuts, layers), strict=True):
        parts = _times_of(tables, devices, lo, hi)
        stages.append(_stage(tables, parts, rows, _Span(lo, hi)))
    table = tables[min(tables, key=lambda size: abs(size - samples // len(devices)))]
    plan = Plan(
        table.model,
        tuple(layer.name for layer in table.layers),
        tuple(stages),
        "data-parallel",
        mini_batch,
        microbatches,
        0.0,
        tuple(table.layers[cut - 1].cut_nbytes for cut in cuts),
        label_of(table, devices),
        "data-parallel",
    )
    return replace(plan, step_s=predict(plan, table).total_s)


class _Times:
    """Seconds of forward and backward of layers lo..hi (hi excluded) on a device, by rows.

    More rows never take less time: a measurement that says so is noise.
    """

    def __init__(
        self,
        tables: Mapping[int, CostTable],
        device: str,
        lo: int,
        hi: int,
        recompute: bool = False,
    ) -> None:
        self.sizes = sorted(tables)
        self.recompute = recompute
        forwards_s = [tables[size].forward_s(device, lo, hi) for size in self.sizes]
        backwards_s = [tables[size].backward_s(device, lo, hi) for size in self.sizes]
        if recompute:
            backwards_s = [sum(both_s) for both_s in zip(backwards_s, forwards_s, strict=True)]
        self._forward_s, self._backward_s = _rising(forwards_s), _rising(backwards_s)

    def knows(self, rows: int) -> bool:
        """Whether this number of rows is within or near the measured ones."""
        return self.sizes[0] <= rows <= BEYOND * self.sizes[-1]

    def at(self, rows: int) -> tuple[float, float]:
        """Return the seconds of forward and backward for this number of rows."""
        return self._line(rows, self._forward_s), self._line(rows, self._backward_s)

    def _line(self, rows: int, times_s: Sequence[float]) -> float:
        if isinf(times_s[-1]):  # a device that cannot run a layer cannot do so at any size
            return inf
        if rows > self.sizes[-1] and len(self.sizes) > 1:
            slope = (times_s[-1] - times_s[-2]) / (self.sizes[-1] - self.sizes[-2])
            return times_s[-1] + slope * (rows - self.sizes[-1])
        return float(np.interp(rows, self.sizes, times_s))


def _times_of(
    tables: Mapping[int, CostTable],
    devices: Sequence[str],
    lo: int,
    hi: int,
    recompute: bool = False,
) -> dict[str, _Times]:
    """Return the times of layers lo..hi on each device; equal devices, with one tuple of costs,
    share theirs."""
    kinds: dict[tuple[int, ...], _Times] = {}
    times = {}
    for device in devices:
        kind = tuple(id(table.devices[device].layers) for table in tables.values())
        if kind not in kinds:
            kinds[kind] = _Times(tables, device, lo, hi, recompute)
        times[device] = kinds[kind]
    return times


def _rising(times_s: Sequence[float]) -> list[float]:
    return list(accumulate(times_s, max))


def _one_of_each_kind(table: CostTable, devices: Sequence[str]) -> list[str]:
    """Return the first of all devices with the same tuple of costs."""
    return list({id(table.devices[device].layers): device for device in reversed(devices)}.values())


def _rows(times: Mapping[str, _Times], samples: int) -> dict[str, int]:
    """Return the rows of each device that minimise the time of the slowest device.

    They begin in the ratio of speeds at equal shares, and move one at a time.
    """
    share = max(1, round(samples / len(times)))
    speeds = [1 / max(sum(each.at(share)), 1e-12) for each in times.values()]
    rows = dict(zip(times, divide_samples(samples, speeds), strict=True))

    def end_s(device: str, more: int = 0) -> float:
        return sum(times[device].at(rows[device] + more))

    while True:
        slowest = max(times, key=end_s)
        quickest = min(times, key=lambda device: end_s(device, 1))
        if end_s(quickest, 1) >= end_s(slowest) or rows[slowest] <= 1:
            break
        rows[slowest] -= 1
        rows[quickest] += 1
    return rows
