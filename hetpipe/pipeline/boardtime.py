"""The time of boards: simulates the schedule that ran, with the boards' modelled times.

Passes on boards take their modelled seconds. Passes on attached devices take the mean of their
measured seconds in the last mini-batches, and links take what the costs say. The schedule fixes the
order of all work, so the speed of the numerics changes neither numbers nor times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError
from hetpipe.pipeline.learning import sums_of
from hetpipe.plan.pricing import predict, predicted_step_s
from hetpipe.plan.times import stage_times
from hetpipe.profile.boards import modelled_costs
from hetpipe.schedule.lanes import laned_stages
from hetpipe.simulate.simulator import simulate

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.table import CostTable
    from hetpipe.optim.rule import Optimizer
    from hetpipe.pipeline.training import Ran
    from hetpipe.plan.plan import Plan
    from hetpipe.simulate.timeline import Timeline
    from hetpipe.simulate.times import StageTimes

MODELLED = "modelled"


@dataclass(frozen=True)
class BoardTime:
    """The modelled times of a plan with boards; `costs` are the costs that made the plan."""

    captured: Captured
    cluster: Cluster
    optimizer: Optimizer
    plan: Plan
    costs: CostTable

    def timeline(self, ran: Ran, walls: Sequence[Timeline]) -> Timeline:
        """Return the modelled timeline of the last run, whose measured timelines are `walls`.

        A stream's timeline has one mini-batch for each wall, and starts with an empty pipeline.
        Raises `HetpipeError` for replicas and a mini-batch of another size than the plan's.
        """
        plan, costs, times = self._priced(ran, walls)
        if ran.schedule is None:
            timeline = predict(plan, costs, times=times, mini_batches=len(walls))
        else:
            workers = tuple(dict.fromkeys(plan.devices))
            timeline = simulate(ran.schedule, times, workers=workers)
        return replace(timeline, label=MODELLED)

    def step_s(self, ran: Ran, walls: Sequence[Timeline]) -> float:
        """Return modelled seconds per mini-batch, for a stream in a full pipeline."""
        if ran.schedule is None:
            return predicted_step_s(*self._priced(ran, walls))
        return self.timeline(ran, walls).total_s

    def _priced(self, ran: Ran, walls: Sequence[Timeline]) -> tuple[Plan, CostTable, StageTimes]:
        plan, costs = self._at(ran.samples)
        laned = set() if ran.schedule is None else laned_stages(ran.schedule)
        return plan, costs, self._with_measured(stage_times(plan, costs), walls, laned)

    def _at(self, samples: tuple[int, ...]) -> tuple[Plan, CostTable]:
        """Return plan and costs for a mini-batch of these micro-batches."""
        plan = self.plan
        if (sum(samples), len(samples)) == (plan.mini_batch, plan.microbatches):
            return plan, self.costs
        if max(plan.replicas) > 1:
            raise HetpipeError(
                f"a mini-batch of {sum(samples)} samples has no modelled time: replicas were "
                f"planned for {plan.mini_batch}; make the plan for that size"
            )
        size = max(samples)
        modelled = modelled_costs(self.captured, self.cluster, self.optimizer, [size])[size]
        devices = {**self.costs.devices, **modelled.devices}
        costs = replace(modelled, devices=devices, links=self.costs.links)
        costs = replace(costs, step_overhead_s=self.costs.step_overhead_s)
        crossing = tuple(costs.layers[cut - 1].cut_nbytes for cut in plan.cuts)
        plan = replace(
            plan, mini_batch=sum(samples), microbatches=len(samples), cut_nbytes=crossing
        )
        return plan, costs

    def _with_measured(
        self, times: StageTimes, walls: Iterable[Timeline], laned: Collection[int]
    ) -> StageTimes:
        """Return the times, with measured means for the stages of attached devices alone.

        `laned` stages keep the times of the costs: their passes lengthen each other, and the
        simulator accounts for that.
        """
        boards = {member.id for member in self.cluster.described}
        stages = enumerate(self.plan.stages)
        real = [n for n, stage in stages if not boards & {*stage.devices} and n not in laned]
        seconds = {
            "F": list(times.forward_s),
            "B": list(times.backward_s),
            "U": list(times.update_s),
        }
        sums = [sums_of(wall) for wall in walls] if real else []
        for stage in real:
            for part, own in seconds.items():
                key = stage, part
                count = sum(counts[key] for _, counts in sums)
                total_s = sum(sums_s[key] for sums_s, _ in sums if key in sums_s)
                if count and total_s > 0:  # a clock that jumps gives a sum of NaN
                    own[stage] = total_s / count
        forward_s, backward_s, update_s = map(tuple, seconds.values())
        return replace(times, forward_s=forward_s, backward_s=backward_s, update_s=update_s)
