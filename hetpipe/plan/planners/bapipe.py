"""BaPipe: balanced stages on a chain of unlike devices, then the schedule (section 3.3).

1. Cuts follow the devices' speeds, and layers move while this shortens the slowest stage. The exact
   cuts are used if their slowest stage is faster.
2. If a transfer takes longer than the slowest stage, only cuts remain whose tensors every link
   transfers within the ideal stage time. The model is cut again at these cuts. If they are too
   few, there are fewer stages.
3. If a stage lacks memory, the exact cuts for stages that fit the memory are used.
4. The prediction chooses among data parallelism and all schedules that the devices' execution
   models allow, at all sizes of micro-batches.
5. A layer at the cut between the slowest stage and a neighbour is split by output channels, if the
   layer allows it and the step becomes shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from hetpipe.cluster.cluster import Cluster
from hetpipe.plan.costs import Array, StageCosts
from hetpipe.plan.intra import with_splits
from hetpipe.plan.partition import balance_cuts, bottleneck, exact, ideal_stage_s, stage_times
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.choice import check_members, fastest_plan, finish_plan
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, Tables, in_flight, single_device_groups
from hetpipe.plan.search import worth_trying
from hetpipe.schedule.rule import rule_of

SYNCHRONOUS = ("1f1b-sno", "1f1b-so")
"""Schedules for devices that send a result only when it is complete (table 1)."""
STREAMING = ("1f1b-as", "fbp")
"""Schedules for devices that send results while they compute."""


def plan(costs: Tables, cluster: Cluster, options: PlannerOptions) -> Plan:
    """Return the fastest of BaPipe's plans. Raises `PlanError`."""
    check_members(costs, cluster)
    priced = Priced(costs, options)
    best = fastest_plan(priced, proposals(priced, cluster), cluster, "bapipe")
    return finish_plan(*with_splits(best, priced), cluster)


def proposals(priced: Priced, cluster: Cluster) -> Iterator[Proposal]:
    """Yield partitions for each schedule and size of micro-batch, and data parallelism."""
    options, members = priced.options, cluster.ids
    table = next(iter(priced.tables.values()))
    streaming = all(table.devices[member].execution == "async" for member in members)
    own = STREAMING if streaming else SYNCHRONOUS
    for count in worth_trying(priced, single_device_groups(members)):
        if options.data_parallel and len(members) > 1:
            yield Proposal((), (members,), "data-parallel", count)
        for schedule in options.among(own):
            if rule_of(schedule).replicates:
                continue
            for stages in range(min(len(members), len(table.layers)), 0, -1):
                bare = Proposal((), single_device_groups(members[:stages]), schedule, count)
                cuts = partition(priced, bare)
                if cuts is not None:
                    yield Proposal(cuts, bare.groups, schedule, count)
                    break  # fewer stages only with too few cuts, or too little memory


def partition(priced: Priced, bare: Proposal) -> tuple[int, ...] | None:
    """Return the balanced cuts of a proposal; None if links or memory do not allow enough cuts."""
    costs = priced.costs(bare)
    devices = [group[0] for group in bare.groups]
    depths = in_flight(bare.schedule, len(devices), bare.microbatches)
    whole_s = [float(costs.compute_s(device, 0, costs.count)) for device in devices]
    ideal_s = ideal_stage_s(whole_s)
    compute_s = [_computes(costs, device) for device in devices]
    cuts = _even(compute_s, whole_s)
    slowest_s = max(stage_times(compute_s, cuts))
    points = list(range(costs.count + 1))
    if _longest_transfer_s(costs, devices, cuts) > slowest_s:
        points = coarse_points(costs, devices, ideal_s)
        if len(points) < len(devices) + 1:
            return None
        cuts = _between(points, compute_s, whole_s)
    room = [
        np.where(np.isfinite(costs.matrix(devices, n, depths[n], "max")), matrix, np.inf)
        for n, matrix in enumerate(compute_s)
    ]
    if np.isfinite(max(stage_times(room, cuts))):
        return cuts
    tuned = exact([matrix[np.ix_(points, points)] for matrix in room])
    return None if tuned is None else tuple(points[cut] for cut in tuned)


def coarse_points(costs: StageCosts, devices: Sequence[str], ideal_s: float) -> list[int]:
    """Return 0, the cuts whose tensors every link transfers within `ideal_s`, and the last cut."""
    links = list(pairwise(devices))
    kept = [
        cut
        for cut in range(1, costs.count)
        if all(costs.transfer_s(here, there, cut) <= ideal_s for here, there in links)
    ]
    return [0, *kept, costs.count]


def _between(
    points: Sequence[int], compute_s: Sequence[Array], whole_s: Sequence[float]
) -> tuple[int, ...]:
    """Return the balanced cuts among these points."""
    coarse = [matrix[np.ix_(points, points)] for matrix in compute_s]
    return tuple(points[cut] for cut in _even(coarse, whole_s))


def _even(compute_s: Sequence[Array], whole_s: Sequence[float]) -> tuple[int, ...]:
    """Return BaPipe's cuts, or the exact cuts if their slowest stage is faster."""
    cuts, other = balance_cuts(compute_s, whole_s), exact(compute_s)
    if other is None or bottleneck(compute_s, cuts) <= bottleneck(compute_s, other):
        return cuts
    return other


def _computes(costs: StageCosts, device: str) -> Array:
    """Return a matrix: [lo, hi] is the seconds of layers lo..hi-1, infinite if there are none."""
    lo, hi = np.ogrid[: costs.count + 1, : costs.count + 1]
    return np.where(lo < hi, costs.compute_s(device, lo, hi), np.inf)


def _longest_transfer_s(costs: StageCosts, devices: Sequence[str], cuts: Sequence[int]) -> float:
    ways = zip(devices[:-1], devices[1:], cuts, strict=True)
    return max((float(costs.transfer_s(*way)) for way in ways), default=0.0)
