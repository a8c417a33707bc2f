"""Limits: tells why a device cannot run a stage: unsupported layers, or too little memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.plan.costs import StageCosts
from hetpipe.plan.plan import Plan
from hetpipe.plan.proposal import Proposal
from hetpipe.schedule.weights import policy_of
from hetpipe.words import words

MIB = 2**20
MISSING = "bytes are missing"  # in every reason that more memory would cure
MOST_REFUSALS = 8  # an error lists the reasons of at most this many devices


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
    """Name the first layer that none of `devices` can run, with the reasons, or return None."""
    kinds = {id(table.devices[device].layers): table.devices[device].layers for device in devices}
    for index, layer in enumerate(table.layers):
        if all(layers[index].impossible for layers in kinds.values()):
            entries = {device: table.devices[device].layers[index] for device in devices}
            refusals = [
                entry.reason if entry.reason.startswith(name) else f"{name}: {entry.reason}"
                for name, entry in entries.items()
            ]
            more = len(refusals) - MOST_REFUSALS
            if more > 0:
                refusals[MOST_REFUSALS:] = [f"{more} more"]
            return (
                f"none of them can run layer {layer.name} ({'; '.join(refusals)}); add a device "
                "that can, or let another device run the operators that it lacks (`lends`); "
                "`hetpipe coverage MODEL DEVICE` lists these operators"
            )
    return None


def why_impossible(proposal: Proposal, costs: StageCosts, weights: str) -> str | None:
    """Return why a proposal without replicas cannot run; None if it can."""
    policy, depths = policy_of(weights), proposal.depths
    used: dict[str, int] = defaultdict(int)
    capacity: dict[str, int] = defaultdict(int)
    for stage, (lo, hi) in enumerate(proposal.spans(costs.count)):
        (device,) = proposal.groups[stage]
        cost = costs.table.devices[device]
        domain, where = cost.memory_domain, f"stage {stage} (layers {lo}..{hi - 1} on {device})"
        if math.isinf(costs.stage_compute_s(device, lo, hi)):
            first = _refused(costs.table, device, lo, hi)[0]
            return f"{where}: the device cannot run {first}"
        versions = policy.versions(depths, stage, proposal.microbatches)
        borrowed = policy.borrowed(depths, stage, proposal.microbatches)
        need = costs.stage_memory_nbytes(lo, hi, depths[stage], versions, 1.0, borrowed)
        used[domain] += need
        capacity[domain] = max(capacity[domain], cost.memory_nbytes)
        if need > cost.memory_nbytes:
            return f"{where} {_lack(need, cost.memory_nbytes)}"
        if used[domain] > capacity[domain]:
            return (
                f"{where}, together with the earlier stages in the memory {domain}, "
                f"{_lack(used[domain], capacity[domain])}"
            )
    return None


def check_memory(plan: Plan) -> None:
    """Raise `PlanError` if stages lack memory; name the stage that lacks most, and the bytes."""
    lacks = [stage.memory_nbytes - stage.capacity_nbytes for stage in plan.stages]
    worst = max(range(len(lacks)), key=lacks.__getitem__)
    if lacks[worst] > 0:
        stage = plan.stages[worst]
        where = f"layers {stage.lo}..{stage.hi - 1} on {words(stage.devices)}"
        need = _lack(stage.memory_nbytes, stage.capacity_nbytes)
        raise PlanError(f"stage {worst} ({where}) {need}")


def notes_on(costs: StageCosts, devices: Iterable[str]) -> Iterator[str]:
    """Yield a note for each of `devices` that cannot run all layers."""
    for device in devices:
        if math.isinf(costs.stage_compute_s(device, 0, costs.count)):
            refused = _refused(costs.table, device, 0, costs.count)
            more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
            yield f"{device} cannot run {refused[0]}{more}"


def _refused(table: CostTable, device: str, lo: int, hi: int) -> list[str]:
    """Return the layers among lo..hi that the device cannot run, each with the reason and the
    devices that can run it."""
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


def _lack(need: int, capacity: int) -> str:
    """Describe the bytes that a stage lacks."""
    return (
        f"needs {need} bytes ({need / MIB:.1f} MiB) and has {capacity} ({capacity / MIB:.1f} MiB): "
        f"{need - capacity} {MISSING}"
    )
