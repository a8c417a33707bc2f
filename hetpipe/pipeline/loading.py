"""Loading: traces the graphs that a plan's devices need, per stage, replica and size in use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetpipe.capture.program import StageGraphs
from hetpipe.pipeline.schedules import Schedules
from hetpipe.sdk.host.registry import decompositions_of
from hetpipe.wire.shares import Replica, Shares

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.passes.stage_graphs import Extra
    from hetpipe.crew.workers import Workers
    from hetpipe.optim.rule import Optimizer
    from hetpipe.plan.plan import Plan
    from hetpipe.wire.messages import Clip


def loading_of(
    captured: Captured,
    plan: Plan,
    optimizer: Optimizer,
    crew: Workers,
    recompute: str | Sequence[str],
    clip: Clip,
) -> Loading:
    """Return the loading of a plan for training, with this `clip` of gradients."""
    if plan.recompute and recompute == "none":
        recompute = "inputs"  # the plan counts on it
    needed: dict[Extra, bool] = {"predict": plan.policy.predicts, "norm": clip.takes_norms}
    needed["finite"] = not clip.takes_norms
    extras = tuple(extra for extra, is_needed in needed.items() if is_needed)
    return Loading(captured, plan, optimizer, crew, recompute, Schedules(plan).halved, extras)


@dataclass(frozen=True)
class Loading:
    """Traces the graphs of a plan for a crew. `recompute` is a mode, or a mode per stage."""

    captured: Captured
    plan: Plan
    optimizer: Optimizer
    crew: Workers
    recompute: str | Sequence[str]
    halves: bool  # backwards come in two halves
    extras: Collection[Extra]
    ahead: bool = True  # members that can begin to compile do so

    @property
    def shares(self) -> Shares:
        """The share of each replica; under a schedule that does not flush, replicas take turns."""
        weights = tuple(stage.shares for stage in self.plan.stages)
        rule = self.plan.rule
        return Shares(weights, not rule.flushes, rule.averages)

    def graphs(self, sizes: Iterable[int], evaluated: Iterable[int]) -> list[list[StageGraphs]]:
        """Return the graphs of all replicas, by stage, for whole micro-batches of these sizes, and
        for evaluation of `evaluated` sizes. Raises `CaptureError`, `HetpipeError`.

        Members that compile ahead begin with their stages while other stages are traced.
        """
        devices = [stage.devices for stage in self.plan.stages]
        graphs: dict[tuple[int, int], StageGraphs] = {}  # by stage and replica
        for number in self._order(devices):
            replicas = [Replica(n, min(number, len(names) - 1)) for n, names in enumerate(devices)]
            stages = self._traced(replicas, self._rows(replicas, set(sizes)), set(evaluated))
            for n, (names, stage) in enumerate(zip(devices, stages, strict=True)):
                if number < len(names):
                    graphs[n, number] = self._own(stage, number, set(sizes))
                    if self.ahead and max(map(len, devices)) > 1:
                        self.crew.compile_ahead({names[number]: [graphs[n, number]]})
        return [[graphs[n, r] for r in range(len(names))] for n, names in enumerate(devices)]

    def whole(self, number: int, sizes: Collection[int]) -> list[StageGraphs]:
        """Return all stages, in the operators of their replica `number` (or the last one), with
        passes for all rows of micro-batches of these sizes."""
        counts = [len(stage.devices) for stage in self.plan.stages]
        replicas = [Replica(n, min(number, count - 1)) for n, count in enumerate(counts)]
        return self._traced(replicas, sorted(sizes, reverse=True), set())

    def _order(self, devices: Sequence[Sequence[str]]) -> list[int]:
        """Return the numbers of replicas; those with a member that compiles ahead come first."""

        def waits(number: int) -> bool:
            own = [names[number] for names in devices if number < len(names)]
            return not any(map(self.crew.compiles_ahead, own))

        return sorted(range(max(map(len, devices))), key=waits)

    def _own(self, stage: StageGraphs, replica: int, sizes: set[int]) -> StageGraphs:
        """Return the stage with only the passes for a replica's rows."""
        rows = {self._count(Replica(stage.stage, replica), size) for size in sizes}
        return replace(stage, passes={n: p for n, p in stage.passes.items() if n in rows})

    def _traced(
        self, replicas: Sequence[Replica], rows: Sequence[int], evaluated: set[int]
    ) -> list[StageGraphs]:
        """Trace all stages, each in the operators of its replica, for these numbers of rows; in
        evaluation for the rows of any replica."""
        stages_of = zip(self.plan.stages, replicas, strict=True)
        devices = [stage.devices[replica.number] for stage, replica in stages_of]
        tables = [decompositions_of(self.crew.infos[name].backend) for name in devices]
        modes = self.recompute
        stages = self.captured.stage_graphs(
            self.plan.cuts,
            tables,
            rows,
            self.optimizer,
            [modes] * len(devices) if isinstance(modes, str) else modes,
            self.halves,
            self.extras,
        )
        if not evaluated:
            return stages
        every = [r for stage in range(len(devices)) for r in self.shares.replicas(stage)]
        forwards = self.captured.evaluation_graphs(
            self.plan.cuts, tables, self._rows(every, evaluated)
        )
        return [
            replace(
                stage,
                evaluation={size: passes.forward for size, passes in other.passes.items()},
                constants={**stage.constants, **other.constants},
            )
            for stage, other in zip(stages, forwards, strict=True)
        ]

    def _rows(self, replicas: Sequence[Replica], sizes: set[int]) -> list[int]:
        """Return the numbers of rows of these replicas in such micro-batches, the largest first."""
        counts = {self._count(replica, size) for replica in replicas for size in sizes}
        return sorted(counts, reverse=True)

    def _count(self, replica: Replica, samples: int) -> int:
        lo, hi = self.shares.rows(replica, samples)
        return hi - lo
