"""Plans without prices, for tests of results rather than times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hetpipe.capture import Captured
from hetpipe.cost.table import CostTable
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.schedule.rule import is_asynchronous


def unpriced(
    captured: Captured,
    members: Sequence[str | Sequence[str]],
    schedule: str,
    mini_batch: int,
    microbatches: int,
    *,
    in_flight: Sequence[int] | None = None,
    weights: str = "flush",
    shares: Sequence[tuple[float, ...]] | None = None,
    cuts: Sequence[int] | None = None,
) -> tuple[Plan, CostTable]:
    """Return a plan with the given cuts, or with equal layer counts; measure nothing.

    `members` names one member per stage, or several for a stage with replicas; a member may have
    several stages. Replicas have equal shares unless `shares` says otherwise.
    """
    names = tuple(layer.name for layer in captured.layer_graph(mini_batch).layers)
    ends = [len(names) * n // len(members) for n in range(len(members) + 1)]
    ends = ends if cuts is None else [0, *cuts, len(names)]
    count = 2 * len(members) if is_asynchronous(schedule) else 1
    places = [(member,) if isinstance(member, str) else tuple(member) for member in members]
    workers = len(set(places))
    depths = in_flight or max_in_flight(
        generate(schedule, len(members), microbatches, mini_batches=count, workers=workers)
    )
    stages = tuple(
        StagePlan(lo, hi, replicas, depth, 0.0, 0.0, 0.0, 0, 0, weights_of)
        for replicas, depth, (lo, hi), weights_of in zip(
            places, depths, pairwise(ends), shares or [()] * len(places), strict=True
        )
    )
    nbytes = (0,) * (len(members) - 1)
    plan = Plan(
        "case", names, stages, schedule, mini_batch, microbatches, 0.0, nbytes, "measured", "even",
        weights=weights,
    )  # fmt: skip
    return plan, CostTable("case", mini_batch // microbatches, (), {})
