"""Groups: stages of several devices, as partitioners see them before a plan has its price."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from hetpipe.plan.costs import Array, Objective, StageCosts

Groups = Sequence[Sequence[str]]
"""By stage, the devices of its replicas."""


def group_matrix(
    costs: StageCosts,
    groups: Groups,
    stage: int,
    in_flight: int,
    objective: Objective,
    microbatches: int,
    versions: int = 1,
) -> Array:
    """Seconds of a micro-batch in stage `stage`, for all [lo, hi]; infinite where it cannot be.

    Replicas divide a micro-batch by their speed; their ring counts for its share of a mini-batch.
    `versions` of the weights live at once.
    """
    heads = [group[0] for group in groups]
    group = groups[stage]
    if len(group) == 1:
        return costs.matrix(heads, stage, in_flight, objective, versions=versions)
    lo = np.arange(costs.count + 1)[:, None]
    hi = np.arange(costs.count + 1)[None, :]
    with np.errstate(divide="ignore"):
        speed = sum(1 / costs.compute_s(device, lo, hi) for device in group)
        seconds = 1 / speed
    share = 1 / len(group)
    sends_s = 0.0
    if stage + 1 < len(groups):
        sends_s = sends_s + share * costs.transfer_s(heads[stage], heads[stage + 1], hi)
    if stage > 0:
        sends_s = sends_s + share * costs.transfer_s(heads[stage], heads[stage - 1], lo)
    hidden = objective == "max" or costs.table.devices[heads[stage]].execution == "async"
    seconds = np.maximum(seconds, sends_s) if hidden else seconds + sends_s
    links = [costs.table.link(group[n - 1], device) for n, device in enumerate(group)]
    ring_Bps = min(link.bandwidth_Bps for link in links)
    seconds = seconds + 2 * (1 - share) * costs.params_nbytes(lo, hi) / ring_Bps / microbatches
    capacity = min(costs.table.devices[device].memory_nbytes for device in group)
    fits = (lo < hi) & (costs.memory_nbytes(lo, hi, in_flight, versions, share) <= capacity)
    return np.where(fits, seconds, math.inf)
