"""What a pipeline plans by: profiles on its crew, and whether a given plan fits crew and model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetpipe.errors import PlanError
from hetpipe.plan.planner import explore, make_plan
from hetpipe.plan.pricing import check_able
from hetpipe.plan.replicated import replicated_plan, staged_plan
from hetpipe.plan.unused import with_notes
from hetpipe.profile.measure import Progress, profile
from hetpipe.schedule.generators import averages, is_asynchronous

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.cost.table import CostTable
    from hetpipe.crew.crew import Crew
    from hetpipe.optim.rule import Optimizer
    from hetpipe.plan.plan import Plan

EXPLORED_MICROBATCHES = (4, 8, 16, 32)
SYNCHRONOUS = ("1f1b", "gpipe")
STAGED_MICROBATCHES = 8
"""Of plans whose stages were given with their replicas."""
DATA_PARALLEL = "data-parallel"
"""The schedule whose every stage, and that is one without cuts, has a replica on each device."""


@dataclass(frozen=True)
class Planning:
    """Plans for one model on one crew."""

    captured: Captured
    crew: Crew
    optimizer: Optimizer
    mini_batch: int
    progress: Progress

    def choose(
        self,
        microbatches: int | None,
        schedule: str,
        weights: str,
        cuts: Sequence[int] | None,
        replicas: Sequence[int] | None = None,
    ) -> tuple[Plan, CostTable]:
        """The quickest predicted plan under these wishes, and the costs that it was made with.

        `replicas` of the stages, with `cuts`, are the cluster's devices in their order.
        Raises `PlanError`.
        """
        if weights == "auto":
            weights = "stash" if is_asynchronous(schedule) else "flush"
        if schedule == DATA_PARALLEL:
            plan, costs = self._replicated(microbatches, cuts or (), replicas)
            return replace(plan, weights=weights), costs
        if not averages(schedule):
            if cuts or (replicas is not None and len(replicas) != 1):
                raise PlanError(
                    f"{schedule} has 1 stage, the whole model on every replica, not cuts "
                    f"{list(cuts or ())} and replicas {list(replicas or ())}: leave out cuts, and "
                    "replicas or give one number, as [2]; or use pipedream"
                )
            replicas = replicas or [len(self.crew.infos)]
        if replicas is not None:
            name = "1f1b" if schedule == "auto" else schedule
            return self._staged(microbatches, name, weights, cuts or (), replicas)
        counts = [microbatches] if microbatches else list(EXPLORED_MICROBATCHES)
        if microbatches is None and is_asynchronous(schedule) and weights != "2bw":
            counts = [1]  # updates as soon as they can be
        tables = self._profiled(counts)
        schedules = SYNCHRONOUS if schedule == "auto" else (schedule,)
        members = list(self.crew.infos)
        if cuts is None:
            plans = explore(
                tables, members, mini_batch=self.mini_batch, schedules=schedules, weights=weights
            )
            best = with_notes(plans, members)
            return best, tables[self._samples(best.microbatches)]
        table = tables[self._samples(counts[0])]
        made = make_plan(
            table,
            members[: len(cuts) + 1],
            mini_batch=self.mini_batch,
            microbatches=counts[0],
            schedule=schedules[0],
            weights=weights,
            cuts=cuts,
        )
        return made, table

    def check(self, plan: Plan, costs: CostTable | None) -> CostTable:
        """The costs for a given plan, profiled if they are not given.

        Raises `PlanError` where the plan is of another model or cluster, or a device cannot run its
        layers.
        """
        layers = len(self.captured.layer_graph(self.mini_batch).layers)
        if plan.stages[-1].hi != layers:
            raise PlanError(
                f"the plan is for {plan.stages[-1].hi} layers, the model has {layers}: "
                "make a new plan for this model"
            )
        for device in (device for stage in plan.stages for device in stage.devices):
            if device not in self.crew.infos:
                raise PlanError(
                    f"the plan uses {device}, the cluster has {', '.join(self.crew.infos)}"
                )
        if costs is None:
            (costs,) = self._profiled([plan.microbatches]).values()
            check_able(plan, costs)
        return costs

    def _replicated(
        self, microbatches: int | None, cuts: Sequence[int], replicas: Sequence[int] | None
    ) -> tuple[Plan, CostTable]:
        """The model, in stages between the cuts, on every device."""
        members = list(self.crew.infos)
        if replicas is not None and list(replicas) != [len(members)] * (len(cuts) + 1):
            raise PlanError(
                f"{DATA_PARALLEL} has a replica of every stage on each of {len(members)} devices, "
                f"not replicas {list(replicas)}: leave them out, or choose another schedule"
            )
        # Shares of unlike devices lie anywhere between a whole mini-batch and next to nothing.
        tables = self._profiled([1, 2, *EXPLORED_MICROBATCHES, max(self.mini_batch // 2, 1)])
        plan = replicated_plan(
            tables, members, cuts, mini_batch=self.mini_batch, microbatches=microbatches
        )
        return plan, tables[min(tables, key=lambda size: abs(size - plan.share_samples))]

    def _staged(
        self,
        microbatches: int | None,
        schedule: str,
        weights: str,
        cuts: Sequence[int],
        replicas: Sequence[int],
    ) -> tuple[Plan, CostTable]:
        """The stages that were asked for, on the devices in their order."""
        members = list(self.crew.infos)
        if sum(replicas) > len(members):
            raise PlanError(
                f"replicas {list(replicas)} need {sum(replicas)} devices, the cluster has "
                f"{len(members)}"
            )
        if microbatches is None:
            microbatches = 1 if is_asynchronous(schedule) else STAGED_MICROBATCHES
        names = iter(members)
        groups = [[next(names) for _ in range(count)] for count in replicas]
        parts = [1] if is_asynchronous(schedule) else sorted({1, *replicas})
        tables = self._profiled([microbatches * part for part in parts])
        plan = staged_plan(
            tables, groups, cuts, mini_batch=self.mini_batch, microbatches=microbatches,
            schedule=schedule, weights=weights,
        )  # fmt: skip
        return plan, tables[self._samples(microbatches)]

    def _samples(self, microbatches: int) -> int:
        return -(-self.mini_batch // microbatches)

    def _profiled(self, counts: Sequence[int]) -> dict[int, CostTable]:
        """Tables for these numbers of micro-batches, by samples of one."""
        sizes = sorted({self._samples(count) for count in counts}, reverse=True)
        return profile(self.captured, self.crew, self.optimizer, sizes, self.progress)
