"""Loading: the graphs that a plan's devices need, for each stage, replica and size in use."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hetpipe.capture.program import StageGraphs
from hetpipe.sdk.registry import decompositions_of
from hetpipe.wire.shares import Replica, Shares

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.capture.stages import Extra
    from hetpipe.optim.rule import Optimizer
    from hetpipe.plan.plan import Plan


@dataclass(frozen=True)
class Loading:
    """Makes the graphs of a plan. `backends` is by member, `recompute` a mode or one per stage."""

    captured: Captured
    plan: Plan
    optimizer: Optimizer
    backends: Mapping[str, str]
    recompute: str | Sequence[str]
    halves: bool  # backwards in two
    extras: Collection[Extra]

    @property
    def shares(self) -> Shares:
        """The work of each replica; without flushes replicas take turns."""
        weights = tuple(stage.shares for stage in self.plan.stages)
        rule = self.plan.rule
        return Shares(weights, not rule.flushes, rule.averages)

    def graphs(self, sizes: Iterable[int], evaluated: Iterable[int]) -> list[list[StageGraphs]]:
        """Per stage its replicas' graphs, for whole micro-batches of these sizes, and in evaluation
        for those of `evaluated`. Raises `CaptureError`, `HetpipeError`."""
        devices = [stage.devices for stage in self.plan.stages]
        graphs: list[list[StageGraphs]] = [[] for _ in devices]
        for replica in range(max(map(len, devices))):
            replicas = [Replica(n, min(replica, len(names) - 1)) for n, names in enumerate(devices)]
            stages = self._traced(replicas, set(sizes), set(evaluated))
            for n, (names, stage) in enumerate(zip(devices, stages, strict=True)):
                if replica < len(names):
                    graphs[n].append(self._own(stage, replica, set(sizes)))
        return graphs

    def _own(self, stage: StageGraphs, replica: int, sizes: set[int]) -> StageGraphs:
        """The stage with only the passes for a replica's rows."""
        rows = {self._count(Replica(stage.stage, replica), size) for size in sizes}
        return replace(stage, passes={n: p for n, p in stage.passes.items() if n in rows})

    def _traced(
        self, replicas: Sequence[Replica], sizes: set[int], evaluated: set[int]
    ) -> list[StageGraphs]:
        """All stages, in the operators of a replica of each, at every size that one of them has;
        in evaluation at every size that any replica has."""
        stages_of = zip(self.plan.stages, replicas, strict=True)
        devices = [stage.devices[replica.number] for stage, replica in stages_of]
        tables = [decompositions_of(self.backends[name]) for name in devices]
        modes = self.recompute
        stages = self.captured.stage_graphs(
            self.plan.cuts,
            tables,
            self._rows(replicas, sizes),
            self.optimizer,
            [modes] * len(devices) if isinstance(modes, str) else modes,
            self.halves,
            self.extras,
        )
        if not evaluated:
            return stages
        every = [r for stage in range(len(devices)) for r in self.shares.replicas(stage)]
        rows = self._rows(every, evaluated)
        forwards = self.captured.evaluation_graphs(self.plan.cuts, tables, rows)
        return [
            replace(
                stage,
                evaluation={size: passes.forward for size, passes in other.passes.items()},
                constants={**stage.constants, **other.constants},
            )
            for stage, other in zip(stages, forwards, strict=True)
        ]

    def _rows(self, replicas: Sequence[Replica], sizes: set[int]) -> list[int]:
        """The numbers of rows that they do of such micro-batches, the largest first."""
        counts = {self._count(replica, size) for replica in replicas for size in sizes}
        return sorted(counts, reverse=True)

    def _count(self, replica: Replica, samples: int) -> int:
        lo, hi = self.shares.rows(replica, samples)
        return hi - lo
