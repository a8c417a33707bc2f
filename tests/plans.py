"""Plans without prices: for tests that are about results, not about times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hetpipe.capture import Captured
from hetpipe.cost.table import CostTable
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.schedule.generators import generate, max_in_flight


def unpriced(
    captured: Captured,
    members: Sequence[str],
    schedule: str,
    mini_batch: int,
    microbatches: int,
) -> tuple[Plan, CostTable]:
    """Equal layer counts, nothing measured: these tests are about results."""
    samples = mini_batch // microbatches
    names = tuple(layer.name for layer in captured.layer_graph(samples).layers)
    cuts = [len(names) * n // len(members) for n in range(len(members) + 1)]
    depths = max_in_flight(generate(schedule, len(members), microbatches))
    stages = tuple(
        StagePlan(lo, hi, (member,), depth, 0.0, 0.0, 0.0, 0, 0)
        for member, depth, (lo, hi) in zip(members, depths, pairwise(cuts), strict=True)
    )
    nbytes = (0,) * (len(members) - 1)
    plan = Plan(
        "case", names, stages, schedule, mini_batch, microbatches, 0.0, nbytes, "measured", "even"
    )
    return plan, CostTable("case", samples, (), {})
