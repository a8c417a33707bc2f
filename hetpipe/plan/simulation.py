"""A plan in the simulator: its timeline, memory, and traffic of links."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable
from hetpipe.plan.costs import StageCosts
from hetpipe.plan.plan import Plan
from hetpipe.plan.pricing import predict, predicted_step_s, stage_times
from hetpipe.schedule.action import Op
from hetpipe.simulate.outcome import Memory, Outcome, outcome
from hetpipe.simulate.timeline import Timeline


@dataclass(frozen=True)
class Simulation:
    """The timeline of one step, and its outcome.

    Without flushes, the timeline has several mini-batches and starts with an empty pipeline. Then
    the outcome describes one mini-batch in a full pipeline; only its memory covers the whole
    timeline.
    """

    plan: Plan
    timeline: Timeline
    outcome: Outcome
    step_s: float
    """Predicted seconds per mini-batch, including the controller's overhead."""

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write."""
        names, outcome = self.outcome.workers, self.outcome
        return {
            "plan": self.plan.to_json(),
            "step_s": self.step_s,
            "label": self.timeline.label,
            "workers": [
                {
                    "name": name,
                    "bubble": outcome.bubble[number],
                    "peak_nbytes": outcome.peak_nbytes[number],
                    "memory": [
                        outcome.memory[number].seconds.tolist(),
                        outcome.memory[number].nbytes.tolist(),
                    ],
                }
                for number, name in enumerate(names)
            ],
            "links": [
                {"source": names[source], "target": names[target], "nbytes": nbytes}
                for (source, target), nbytes in sorted(outcome.link_nbytes.items())
            ],
            "timeline": self.timeline.to_json(),
        }


def simulate(plan: Plan, costs: CostTable, cluster: Cluster | None = None) -> Simulation:
    """Simulate a plan without its devices, by the costs at the plan's size of micro-batches.

    With a `cluster`, messages and sums over replicas share the cluster's buses, half-duplex links
    and uplinks of switches (`hetpipe.plan.sharing`). Raises `CostError` or `PlanError` if the costs
    lack a device or link of the plan, and `ClusterError` if the cluster lacks a device of the plan.
    """
    times = stage_times(plan, costs, cluster=cluster)
    timeline = predict(plan, costs, times=times)
    whole = outcome(timeline, memories(plan, costs))
    if plan.rule.flushes:
        return Simulation(plan, timeline, whole, timeline.total_s)
    step_s = predicted_step_s(plan, costs, times)
    return Simulation(plan, timeline, _of_one(whole, timeline, step_s), step_s)


def _of_one(whole: Outcome, timeline: Timeline, step_s: float) -> Outcome:
    """Return the outcome of one mini-batch in a full pipeline; `whole` covers the timeline."""
    count = 1 + max(s.action.number for s in timeline.spans if s.action.op is Op.UPDATE)
    busy_s = ((1 - bubble) * whole.step_s / count for bubble in whole.bubble)
    return replace(
        whole,
        step_s=step_s,
        bubble=tuple(1 - each_s / step_s if step_s else 0.0 for each_s in busy_s),
        link_nbytes={link: nbytes // count for link, nbytes in whole.link_nbytes.items()},
    )


def memories(plan: Plan, costs: CostTable) -> tuple[Memory, ...]:
    """Return, by stage, the constant bytes and the bytes that each micro-batch in flight adds.

    If a backward has two halves, the weight half is assumed to need half of the added bytes.
    """
    stages = StageCosts(costs, plan.recompute)
    parts = []
    for number, stage in enumerate(plan.stages):
        versions = plan.policy.versions(plan.in_flight, number, plan.microbatches)
        share = max(stage.shares) / sum(stage.shares)
        borrowed = plan.policy.borrowed(plan.in_flight, number, plan.microbatches)
        kept = versions, share, borrowed
        with_one = int(stages.memory_nbytes(stage.lo, stage.hi, 1, *kept))
        with_two = int(stages.memory_nbytes(stage.lo, stage.hi, 2, *kept))
        saved = costs.trains * (with_two - with_one)
        cut_nbytes = plan.cut_nbytes[number] if number < len(plan.cut_nbytes) else 0
        parts.append(Memory(with_one - saved, saved, saved // 2, cut_nbytes))
    return tuple(parts)
