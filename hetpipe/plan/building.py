"""Building: makes the plan of a proposal, with the rows of its replicas and its predicted step.

Replicas divide micro-batches in proportion to their speeds. Without flushes the replicas take
turns, and the time of the slowest replica counts. Under data parallelism every device has all
stages, and the same rows in each stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isinf

from hetpipe.cost.between import with_sizes_between
from hetpipe.errors import PlanError
from hetpipe.plan.costs import StageCosts
from hetpipe.plan.interval import with_interval
from hetpipe.plan.limits import notes_on, why_unable
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.plan.pricing import label_of, predicted_step_s, stage_times
from hetpipe.plan.proposal import Proposal, Tables, nearest_table
from hetpipe.plan.shares import ReplicaTimes, all_reduce_s, fastest_rows, times_of
from hetpipe.schedule.rule import rule_of
from hetpipe.schedule.weights import policy_of
from hetpipe.words import words


def build_plan(
    proposal: Proposal,
    costs: Mapping[int, StageCosts],
    mini_batch: int,
    weights: str = "flush",
    rows: Sequence[Sequence[int]] = (),
) -> Plan:
    """Return the plan of a proposal, with its step predicted by simulation.

    `costs` are by micro-batch size, for whole micro-batches and for the shares of replicas, while
    all devices of the proposal compute. `rows` are the rows of a micro-batch by stage and replica;
    by default they minimise the time of the slowest replica. Raises `PlanError` if the cuts do not
    fit the model, a device cannot run its layers, or a device's rows under data parallelism are
    beyond the sizes of the costs.
    """
    spans = _checked_spans(proposal, next(iter(costs.values())))
    rule, samples = rule_of(proposal.schedule), -(-mini_batch // proposal.microbatches)
    everywhere: dict[str, int] = {}  # rows under data parallelism
    if rule.replicates:
        everywhere = _equal_rows(proposal, costs, mini_batch, rows)
        samples //= len(everywhere)
    policy, depths, stages = policy_of(weights), proposal.depths, []
    for number, (group, (lo, hi)) in enumerate(zip(proposal.groups, spans, strict=True)):
        times = times_of(costs, group, lo, hi)
        if everywhere:
            own = everywhere
        elif rows and len(group) > 1:
            own = dict(zip(group, rows[number], strict=True))
        else:
            own = fastest_rows(times, samples) if rule.flushes else dict.fromkeys(group, samples)
        versions = policy.versions(depths, number, proposal.microbatches)
        borrowed = policy.borrowed(depths, number, proposal.microbatches)
        stages.append(_stage(costs, times, own, (lo, hi), (depths[number], versions, borrowed)))
    nearest = costs[min(costs, key=lambda size: abs(size - samples))]
    table = nearest.table
    plan = Plan(
        table.model,
        tuple(layer.name for layer in table.layers),
        tuple(stages),
        proposal.schedule,
        mini_batch,
        proposal.microbatches,
        step_s=0.0,
        cut_nbytes=tuple(table.layers[cut - 1].cut_nbytes for cut in proposal.cuts),
        label=label_of(table, proposal.devices),
        origin="data-parallel" if rule.replicates else "user",
        notes=tuple(notes_on(nearest, dict.fromkeys(proposal.devices))),
        weights=weights,
        recompute=nearest.recompute,
    )
    return replace(plan, step_s=predicted_step_s(plan, table, stage_times(plan, table, True)))


def costs_of(tables: Tables, proposal: Proposal) -> dict[int, StageCosts]:
    """Return the costs at each size of `tables` while all devices of the proposal compute."""
    count = len(set(proposal.devices))
    return {s: StageCosts(table.beside(count), proposal.recompute) for s, table in tables.items()}


def replicated_plan(
    tables: Tables,
    devices: Sequence[str],
    cuts: Sequence[int] = (),
    *,
    mini_batch: int,
    microbatches: int | None = None,
) -> Plan:
    """Return the fastest predicted plan with the whole model on each of `devices`.

    A step is the slowest replica's passes, an all-reduce and an update. With `cuts` the gradients
    of a stage are summed while earlier stages compute. `tables` are by micro-batch size; times of
    other sizes are interpolated. If `microbatches` is None, powers of two are tried. Raises
    `PlanError` as `build_plan` does.
    """
    most = mini_batch // max(len(devices), 1)  # each device needs a row
    counts = [microbatches] if microbatches else [2**k for k in range(most.bit_length())]
    groups = (tuple(devices),) * (len(cuts) + 1)
    plans: list[Plan] = []
    refusal: PlanError | None = None
    for count in counts or [1]:
        try:
            proposal = Proposal(tuple(cuts), groups, "data-parallel", count)
            plans.append(build_plan(proposal, costs_of(tables, proposal), mini_batch))
        except PlanError as error:
            refusal = error
    if not plans:
        assert refusal is not None
        raise refusal
    plan = min(plans, key=lambda plan: plan.step_s)
    return with_interval(plan, nearest_table(tables, plan))


def _checked_spans(proposal: Proposal, costs: StageCosts) -> list[tuple[int, int]]:
    """Return the layers lo..hi (hi excluded) of each stage. Raises `PlanError`."""
    groups, cuts, layers = proposal.groups, proposal.cuts, costs.count
    ends = [0, *cuts, layers]
    if len(groups) != len(cuts) + 1 or sorted(set(ends)) != ends:
        raise PlanError(
            f"{len(groups)} stages and cuts {list(cuts)}: give one cut between each two stages, "
            f"ascending, from 1 to {layers - 1}"
        )
    if min(map(len, groups)) < 1:
        raise PlanError(
            f"replicas {[len(group) for group in groups]}: each stage needs one or more"
        )
    spans = proposal.spans(layers)
    for number, (group, (lo, hi)) in enumerate(zip(groups, spans, strict=True)):
        for device in costs.alike(tuple(group)):
            if isinf(costs.stage_compute_s(device, lo, hi)):
                raise PlanError(f"stage {number}: {why_unable(costs.table, device, lo, hi)}")
    return spans


def _equal_rows(
    proposal: Proposal,
    costs: Mapping[int, StageCosts],
    mini_batch: int,
    rows: Sequence[Sequence[int]],
) -> dict[str, int]:
    """Return the rows of a micro-batch that each device has, the same rows in all stages.

    Raises `PlanError` for a single device, and for rows beyond the sizes of the costs.
    """
    devices = proposal.groups[0]
    times = times_of(costs, devices, 0, next(iter(costs.values())).count)
    if rows:
        own = dict(zip(devices, rows[0], strict=True))
    else:
        own = fastest_rows(times, -(-mini_batch // proposal.microbatches))
    if len(devices) < 2 or not all(times[device].knows(own[device]) for device in devices):
        raise PlanError(
            f"no data-parallel plan for {words(devices)}: there must be two or more devices, and "
            f"the rows of each in a micro-batch must be between the measured sizes {min(costs)} "
            f"and {max(costs)} (or little above); profile other sizes, or use a pipeline"
        )
    return own


def _stage(
    costs: Mapping[int, StageCosts],
    times: Mapping[str, ReplicaTimes],
    rows: Mapping[str, int],
    span: tuple[int, int],
    kept: tuple[int, int, int],
) -> StagePlan:
    """Return a stage of layers `span` on the devices of `times`; `rows` are by device.

    `kept` is (forwards in flight, versions of the weights, versions of other stages' parameters).
    """
    devices, (lo, hi), (in_flight, versions, borrowed) = tuple(times), span, kept
    times_s = [times[device].at(rows[device]) for device in devices]
    forward_s, backward_s = max(times_s, key=sum)
    own = _costs_near(costs, max(rows.values()))
    # Equal devices share a tuple of costs, so one of them stands for all.
    kinds = {id(own.table.devices[device].layers): device for device in reversed(devices)}
    return StagePlan(
        lo, hi, devices, in_flight, forward_s, backward_s,
        max([own.stage_passes_s(device, lo, hi)[2] for device in kinds.values()]),
        own.stage_memory_nbytes(lo, hi, in_flight, versions, 1.0, borrowed),
        min([own.table.devices[device].memory_nbytes for device in devices]),
        tuple([float(rows[device]) for device in devices]) if len(devices) > 1 else (),
        all_reduce_s(own.table, devices, lo, hi) if len(devices) > 1 and own.table.trains else 0.0,
    )  # fmt: skip


def _costs_near(costs: Mapping[int, StageCosts], size: int) -> StageCosts:
    """Return the costs at a size of micro-batches: measured, modelled between two measured sizes,
    or else at the nearest size."""
    if size in costs:
        return costs[size]
    tables = with_sizes_between({size: each.table for size, each in costs.items()}, [size])
    nearest = min(tables, key=lambda known: abs(known - size))
    recompute = next(iter(costs.values())).recompute
    return costs[nearest] if nearest in costs else StageCosts(tables[nearest], recompute)
