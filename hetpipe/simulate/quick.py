"""Quick pricing: the length of a step without its timeline, for planners that price many plans.

Under a schedule that flushes, the order of all steps depends on the schedule alone. So the order is
kept, and every price is one walk through it. Schedules with lanes or with sums over replicas need
the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hetpipe.errors import ScheduleError
from hetpipe.schedule.columns import columns_of
from hetpipe.schedule.complete import Pair, complete_passes
from hetpipe.schedule.lanes import laned_stages
from hetpipe.schedule.order import Order
from hetpipe.schedule.rule import Rule
from hetpipe.simulate.times import StageTimes
from hetpipe.simulate.walk import moments_of

KEPT = 256
"""The number of orders that are remembered, the latest ones."""


@dataclass(frozen=True)
class Pricing:
    """Prices steps under one schedule."""

    order: Order

    def step_s(self, times: StageTimes) -> float:
        """Return the seconds of a step without the controller's overhead."""
        return max(moments_of(self.order, times).arrivals_s)


@lru_cache(KEPT)
def order_of(
    rule: Rule,
    stages: int,
    microbatches: int,
    in_flight: tuple[int, ...],
    workers: int,
    pairs: tuple[Pair, ...] = (),
) -> Pricing | None:
    """Return the pricing under a rule; None if only the simulator can price it.

    `pairs` are stages that share parameters. Raises `ScheduleError` if the rule does, or if its
    schedule deadlocks.
    """
    if not rule.flushes:
        return None
    passes = columns_of(rule.rows(stages, microbatches, in_flight, workers))
    if laned_stages(passes):
        return None
    order = complete_passes(passes, stages, pairs, ()).order
    if order is None:
        raise ScheduleError(
            f"{rule.name} deadlocks with {stages} stages and {microbatches} micro-batches"
        )
    return Pricing(order)
