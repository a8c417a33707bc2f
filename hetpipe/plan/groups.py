"""Groups: partitions into stages with several devices each, without prices of whole plans."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hetpipe.plan.bisection import Stage, fixed_order
from hetpipe.plan.costs import Array, Objective, StageCosts
from hetpipe.plan.partition import exact

MATRICES = 2**15  # with more entries in a partition's matrices, bisection is faster

Groups = Sequence[Sequence[str]]  # the devices of the replicas of each stage


def group_matrix(
    costs: StageCosts,
    groups: Groups,
    stage: int,
    in_flight: int,
    objective: Objective,
    microbatches: int,
    versions: int = 1,
    bounded: bool = True,
) -> Array:
    """Return the seconds of a micro-batch in a stage, for all [lo, hi]; infinite if impossible.

    Replicas divide a micro-batch in proportion to their speeds. The ring that sums their gradients
    once per mini-batch counts in equal parts for all micro-batches. The stage keeps `versions` of
    the weights. Stages that exceed the memory are impossible if `bounded`.
    """
    heads = [group[0] for group in groups]
    group = groups[stage]
    if len(group) == 1:
        return costs.matrix(heads, stage, in_flight, objective, bounded, versions)
    lo, hi = np.ogrid[: costs.count + 1, : costs.count + 1]
    with np.errstate(divide="ignore"):
        alike = costs.alike(tuple(group)).items()
        seconds = 1 / sum(count / costs.compute_s(each, lo, hi) for each, count in alike)
    share = 1 / len(group)
    sends_s = 0.0
    if stage + 1 < len(groups):
        sends_s = sends_s + share * costs.transfer_s(heads[stage], heads[stage + 1], hi)
    if stage > 0:
        sends_s = sends_s + share * costs.gradient_s(heads[stage], heads[stage - 1], lo)
    hidden = objective == "max" or costs.table.devices[heads[stage]].execution == "async"
    seconds = np.maximum(seconds, sends_s) if hidden else seconds + sends_s
    ring_Bps = min(link.sum_Bps for link in costs.table.chain((*group, group[0])))
    seconds = seconds + 2 * (1 - share) * costs.gradient_nbytes(lo, hi) / ring_Bps / microbatches
    least = min(costs.table.devices[device].memory_nbytes for device in group)
    capacity = least if bounded else math.inf
    fits = (lo < hi) & (costs.memory_nbytes(lo, hi, in_flight, versions, share) <= capacity)
    return np.where(fits, seconds, math.inf)


def best_partition(
    costs: StageCosts,
    groups: Groups,
    in_flight: Sequence[int],
    objective: Objective,
    microbatches: int,
    versions: Sequence[int],
) -> tuple[int, ...] | None:
    """Return the cuts whose slowest stage is fastest, with one stage for each group.

    None if no cuts are possible. A bisection solves large problems. The dynamic programme solves
    small problems, and problems without additive costs: with tied parameters, recompute or unlike
    replicas.
    """
    alike = all(_alike(costs, group) for group in groups)
    additive = alike and not costs.table.tied and not costs.recompute
    if additive and len(groups) * costs.count**2 > MATRICES:
        stages = [
            _line(costs, groups, n, in_flight[n], microbatches, versions[n])
            for n in range(len(groups))
        ]
        best = fixed_order(stages, objective)
        return None if best is None else best[1]
    return exact(
        [
            group_matrix(costs, groups, n, in_flight[n], objective, microbatches, versions[n])
            for n in range(len(groups))
        ]
    )


def _alike(costs: StageCosts, group: Sequence[str]) -> bool:
    """Whether all replicas take equal times."""
    first, *others = (costs.table.devices[device] for device in group)
    return all(o.layers == first.layers and o.overhead_s == first.overhead_s for o in others)


def _line(
    costs: StageCosts,
    groups: Groups,
    number: int,
    in_flight: int,
    microbatches: int,
    versions: int,
) -> Stage:
    """Return the stage of a group as prefix sums, with the times and bytes of `group_matrix`."""
    heads, group = [group[0] for group in groups], groups[number]
    share, cuts = 1 / len(group), np.arange(costs.count + 1)
    seconds, unsupported, overhead_s = costs.prefixes(heads[number])
    ring_s = 0.0
    if len(group) > 1:
        ring_Bps = min(link.sum_Bps for link in costs.table.chain((*group, group[0])))
        ring_s = 2 * (1 - share) * costs.gradient_nbytes(0, cuts) / ring_Bps / microbatches
    none = np.zeros(costs.count + 1)
    arrive_s, leave_s = none, none
    if number > 0:
        arrive_s = share * costs.gradient_s(heads[number], heads[number - 1], cuts)
    if number + 1 < len(heads):
        leave_s = share * costs.transfer_s(heads[number], heads[number + 1], cuts)
    nbytes, buffers = costs.additive_nbytes(in_flight, versions, share)
    blocked = np.searchsorted(unsupported, unsupported, "right") - 1
    return Stage(
        share * seconds + ring_s, share * overhead_s, arrive_s, leave_s,
        blocked, nbytes, buffers,
        min(costs.table.devices[device].memory_nbytes for device in group),
    )  # fmt: skip
