"""Planner: puts a stage on each given device, and chooses their order, the cuts and the schedule.

The planners in `hetpipe.plan.planners` also choose which devices to use, and replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError, ScheduleError
from hetpipe.plan.cures import why_not
from hetpipe.plan.interval import with_interval
from hetpipe.plan.limits import why_unrunnable
from hetpipe.plan.plan import Plan
from hetpipe.plan.priced import Priced
from hetpipe.plan.pricing import predict
from hetpipe.plan.proposal import (
    PlannerOptions,
    Proposal,
    Tables,
    groups_for,
    in_flight,
    single_device_groups,
)
from hetpipe.plan.search import (
    FREE_ORDER_DEVICES,
    improve_plan,
    propose_depths,
    propose_partitions,
)
from hetpipe.schedule.rule import rule_of
from hetpipe.words import words

__all__ = ["make_pipeline", "make_plan", "predict"]


def make_plan(
    table: CostTable,
    devices: Sequence[str],
    *,
    mini_batch: int,
    microbatches: int,
    schedule: str = "1f1b",
    cuts: Sequence[int] | None = None,
    fixed_order: bool = False,
    weights: str = "auto",
) -> Plan:
    """Return the plan of `make_pipeline` for one number of micro-batches and one schedule.

    `weights` is the policy of an asynchronous schedule for versions of the weights
    (`hetpipe.schedule.weights`). Raises `PlanError` as `make_pipeline` does, and for costs of
    another micro-batch size.
    """
    options = PlannerOptions(
        mini_batch, (microbatches,), (schedule,), weights, free_order=not fixed_order
    )
    samples = options.size(microbatches)
    if samples != table.samples:
        raise PlanError(
            f"{microbatches} micro-batches of a mini-batch of {mini_batch} have up to {samples} "
            f"samples each, but the costs are for {table.samples}; profile at {samples}"
        )
    return make_pipeline({samples: table}, devices, options, cuts)


def make_pipeline(
    tables: Tables,
    devices: Sequence[str],
    options: PlannerOptions,
    cuts: Sequence[int] | None = None,
) -> Plan:
    """Return the plan with the shortest predicted step that uses each of `devices`.

    A device has one stage, or as many stages as the schedule gives each worker.

    Tries every order of up to 4 devices, unless the options or `cuts` (layer indices) fix the
    order; for more devices only the given order. If the schedule allows it, the number of forwards
    in flight is also chosen: a larger number if hiding transfers makes the step faster, a smaller
    number if memory requires it. `tables` are by micro-batch size. Raises `PlanError` if there are
    more stages than layers, or if no partition fits.
    """
    priced = Priced(tables, replace(options, replicas=False))
    _check(priced, devices, cuts)
    if cuts is not None:
        plan = _quickest(
            priced, list(propose_depths(priced, devices, tuple(cuts))), devices, "user"
        )
        own = in_flight(plan.schedule, len(plan.stages), plan.microbatches)
        if plan.in_flight != own:
            note = f"by the costs, depths {words(plan.in_flight)} are better than {words(own)}"
            plan = replace(plan, notes=(*plan.notes, note))
    else:
        free = options.free_order and len(devices) <= FREE_ORDER_DEVICES
        proposals: list[Proposal] = []
        for order in permutations(devices) if free else [tuple(devices)]:
            limit_s = priced.shortest_s(proposals)
            groups = single_device_groups(order)
            proposals += propose_partitions(priced, groups, limit_s=limit_s)
        plan = _quickest(priced, proposals, devices, "balanced")
        plan = improve_plan(plan, priced, moves_only=True)
    return with_interval(plan, priced.table(options.size(plan.microbatches)))


def _quickest(
    priced: Priced, proposals: Sequence[Proposal], devices: Sequence[str], origin: str
) -> Plan:
    try:
        return priced.quickest(proposals, origin)
    except PlanError as error:
        why = str(error) if proposals else _why_nothing(priced, devices)
        raise PlanError(f"no plan for {words(devices)}: {why}") from error


def _why_nothing(priced: Priced, devices: Sequence[str]) -> str:
    """Return why there is no proposal with a stage on each device."""
    for schedule in priced.options.schedules:
        for count in priced.options.counts(priced.tables):
            try:
                groups_for(schedule, single_device_groups(devices), count)
            except ScheduleError as error:
                return str(error)
    table = next(iter(priced.tables.values()))
    return why_unrunnable(table, devices) or why_not(priced, devices)


def _check(priced: Priced, devices: Sequence[str], cuts: Sequence[int] | None) -> None:
    if not devices or len(set(devices)) != len(devices):
        raise PlanError(f"devices {list(devices)}: name one or more, each once")
    table = next(iter(priced.tables.values()))
    for device in devices:
        if device not in table.devices:
            there = words(table.devices)
            raise PlanError(f"no costs for {device}; the table of {table.model} has {there}")
    layers = len(table.layers)
    schedules = priced.options.schedules or ("1f1b",)
    per_device = max(rule_of(schedule).stages_per_worker for schedule in schedules)
    if per_device * len(devices) > layers:
        raise PlanError(
            f"{per_device * len(devices)} stages need a layer each; {table.model} has {layers}: "
            f"use at most {layers // per_device} devices"
        )
    ends, needed = [0, *(cuts or ()), layers], per_device * len(devices) - 1
    if cuts is not None and (len(cuts) != needed or sorted(set(ends)) != ends):
        raise PlanError(
            f"cuts {list(cuts)}: the devices {words(devices)} need {needed} cuts, each greater "
            f"than the one before, from 1 to {layers - 1}"
        )


def with_notes(plan: Plan, tables: Tables, devices: Sequence[str], options: PlannerOptions) -> Plan:
    """Return the plan with a note for each of `devices` that it omits.

    The note compares the plan with a second one: the fastest plan by these options that has a stage
    on each device of the first plan and on the omitted device. If more than 4 devices are omitted,
    one note names all of them.
    """
    unused = [device for device in devices if device not in plan.all_devices]
    if len(unused) > FREE_ORDER_DEVICES:
        return replace(plan, notes=(*plan.notes, f"{words(unused)} are left out"))
    return replace(
        plan, notes=(*plan.notes, *(_note(plan, tables, device, options) for device in unused))
    )


def _note(plan: Plan, tables: Tables, device: str, options: PlannerOptions) -> str:
    used = dict.fromkeys((*plan.all_devices, device))
    try:
        rival = make_pipeline(tables, list(used), options)
    except PlanError:
        return f"{device} is left out: no plan with a stage on each of {words(used)} is possible"
    return (
        f"{device} is left out: a step without it is predicted to take {1e3 * plan.step_s:.2f} ms, "
        f"with it {1e3 * rival.step_s:.2f} ms at best, with a stage on each of "
        f"{words(rival.all_devices)}"
    )
