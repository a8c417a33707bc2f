"""Pipeline: the public face. Captures, profiles, plans, starts the workers and trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.capture.captured import Captured
from hetpipe.capture.program import BUFFER, GRAD, PARAM, STATE, StageGraphs
from hetpipe.engine.crew import Crew, StepRequest
from hetpipe.engine.measure import Progress, profile
from hetpipe.errors import HetpipeError, PlanError
from hetpipe.plan.planner import explore, make_plan, predict
from hetpipe.plan.pricing import check_able
from hetpipe.schedule.action import Op, Schedule
from hetpipe.schedule.generators import generate
from hetpipe.schedule.validate import validate
from hetpipe.sdk.registry import get_backend

if TYPE_CHECKING:
    import torch

    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.table import CostTable
    from hetpipe.optim.rule import Optimizer
    from hetpipe.plan.plan import Plan
    from hetpipe.simulate.timeline import Timeline

EXPLORED_MICROBATCHES = (4, 8, 16, 32)


@dataclass(frozen=True)
class Result:
    """One mini-batch of a run. `versions`: the weight version that each stage used."""

    index: int
    loss: float
    versions: tuple[int, ...]


class Pipeline:
    """A model in training on a cluster; use it as a context manager.

    `example` is one mini-batch `(x, y)`: tensors, tuples or dicts of them, batch first. `loss_fn`
    takes the model's output and `y` and returns a mean over samples, or `(sum, count)`.
    `microbatches=None` lets the planner choose. `plan` (or `cuts`, layer indices) overrides the
    planner; `costs` is the table that `plan` was made with, else the pipeline profiles for it. A
    `crew` (started workers) or a `captured` model that is given is used and left running; a crew
    serves one pipeline at a time. Raises children of `HetpipeError` only.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        example: tuple[Any, Any],
        *,
        cluster: Cluster,
        optimizer: Optimizer,
        microbatches: int | None = None,
        schedule: str = "auto",
        plan: Plan | None = None,
        costs: CostTable | None = None,
        cuts: Sequence[int] | None = None,
        seed: int = 0,
        progress: Progress | None = None,
        captured: Captured | None = None,
        crew: Crew | None = None,
    ) -> None:
        self._progress = progress or (lambda text, done, total: None)
        self._progress("capturing", 0, 1)
        self._captured = captured or Captured(model, loss_fn, example)
        self._names = list(model.state_dict())
        self._optimizer = optimizer
        self._seed = seed
        self._steps = 0
        self._mini_batch = _rows(self._captured.leaves(*example))
        self._borrowed = crew is not None
        self._crew = crew or Crew.start(cluster)
        try:
            if plan is None:
                self.plan, self.costs = self._planned(microbatches, schedule, cuts)
            else:
                self.plan = self._fitting(plan)
                if costs is None:
                    costs = self._profiled([plan.microbatches])[plan.microbatches]
                    check_able(plan, costs)
                self.costs = costs
            self._loaded: set[int] = set()
            self._load(set(_sizes(self._mini_batch, self.plan.microbatches)), None)
        except BaseException:
            self.close()
            raise
        self._timeline: Timeline | None = None

    def step(self, x: Any, y: Any) -> float:
        """Train on one mini-batch, completely; its mean loss."""
        return self._step(x, y, update=True)

    def run(self, batches: Iterable[tuple[Any, Any]]) -> Iterator[Result]:
        """Train on a stream of mini-batches; a result for each, in order."""
        for index, (x, y) in enumerate(batches):
            version = self._steps
            yield Result(index, self.step(x, y), (version,) * len(self.plan.stages))

    def flush(self) -> None:
        """Wait until everything handed in is applied. Synchronous schedules always are."""

    def gradients(self, x: Any, y: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of one mini-batch by parameter name; the model stays as it is."""
        import torch

        buffers = self._crew.read(BUFFER)
        loss = self._step(x, y, update=False)
        grads = self._crew.read(GRAD)
        self._crew.write(BUFFER, buffers)
        self._crew.write(GRAD, {name: np.zeros_like(grad) for name, grad in grads.items()})
        return loss, {name: torch.from_numpy(grad.copy()) for name, grad in grads.items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The full model's parameters and buffers under their original names, on the CPU."""
        import torch

        known = {**self._captured.parameters, **self._captured.buffers}
        known.update(self._crew.read(PARAM))
        known.update(self._crew.read(BUFFER))
        aliases = self._captured.aliases
        return {
            name: torch.from_numpy(np.array(known[aliases.get(name, name)]))
            for name in self._names
            if aliases.get(name, name) in known
        }

    @property
    def timeline(self) -> Timeline:
        """Measured timeline of the last step. Raises `HetpipeError` before the first."""
        if self._timeline is None:
            raise HetpipeError("no step has been taken yet: call step() before timeline")
        return self._timeline

    @property
    def predicted(self) -> Timeline:
        """The plan's timeline, from profiles and links alone."""
        return predict(self.plan, self.costs)

    def close(self) -> None:
        """Stop the workers, unless they were lent."""
        if not self._borrowed:
            self._crew.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _planned(
        self, microbatches: int | None, schedule: str, cuts: Sequence[int] | None
    ) -> tuple[Plan, CostTable]:
        counts = [microbatches] if microbatches else list(EXPLORED_MICROBATCHES)
        tables = self._profiled(counts)
        schedules = ("1f1b", "gpipe") if schedule == "auto" else (schedule,)
        members = list(self._crew.infos)
        if cuts is None:
            by_size = {table.samples: table for table in tables.values()}
            best = explore(by_size, members, mini_batch=self._mini_batch, schedules=schedules)[0]
            return best, by_size[-(-self._mini_batch // best.microbatches)]
        made = make_plan(
            tables[counts[0]],
            members[: len(cuts) + 1],
            mini_batch=self._mini_batch,
            microbatches=counts[0],
            schedule=schedules[0],
            cuts=cuts,
        )
        return made, tables[counts[0]]

    def _profiled(self, counts: Sequence[int]) -> dict[int, CostTable]:
        """A table for each of these numbers of micro-batches."""
        sizes = {count: -(-self._mini_batch // count) for count in counts}
        wanted = sorted(set(sizes.values()), reverse=True)
        tables = profile(self._captured, self._crew, self._optimizer, wanted, self._progress)
        return {count: tables[size] for count, size in sizes.items()}

    def _fitting(self, plan: Plan) -> Plan:
        layers = len(self._captured.layer_graph(self._mini_batch).layers)
        if plan.stages[-1].hi != layers:
            raise PlanError(
                f"the plan is for {plan.stages[-1].hi} layers, the model has {layers}: "
                "make a new plan for this model"
            )
        for stage in plan.stages:
            for device in stage.devices:
                if device not in self._crew.infos:
                    raise PlanError(
                        f"the plan uses {device}, the cluster has {', '.join(self._crew.infos)}"
                    )
        return plan

    def _load(self, sizes: set[int], kept: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Give the workers the stages for these micro-batch sizes; `kept` by role, else initial."""
        members = [stage.devices[0] for stage in self.plan.stages]
        self._progress("compiling stages", 0, 1)
        self._loaded = sizes
        stages: list[StageGraphs] = self._captured.stage_graphs(
            self.plan.cuts,
            [get_backend(self._crew.infos[m].backend).decompositions() for m in members],
            sorted(sizes, reverse=True),
            self._optimizer,
        )
        self._tied = tuple(
            {(owner, others): None for stage in stages for _, owner, others in stage.tied}
        )
        values = {**self._captured.parameters, **self._captured.buffers}
        if kept is not None:
            values.update(kept[PARAM])
            values.update(kept[BUFFER])
        self._crew.load(stages, members, values)
        if kept is not None:
            self._crew.write(STATE, kept[STATE])
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._progress("compiling stages", 1, 1)

    def _schedule(self, microbatches: int, update: bool) -> Schedule:
        key = (microbatches, update)
        if key not in self._schedules:
            stages = self.plan.stages
            in_flight = [min(stage.in_flight, microbatches) for stage in stages]
            made = generate(
                self.plan.schedule, len(stages), microbatches, in_flight=in_flight, tied=self._tied
            )
            validate(made, microbatches)
            if not update:
                made = tuple(tuple(a for a in worker if a.op not in _UPDATING) for worker in made)
            self._schedules[key] = made
        return self._schedules[key]

    def _step(self, x: Any, y: Any, update: bool) -> float:
        leaves = self._captured.leaves(x, y)
        rows = _rows(leaves)
        samples = _sizes(rows, self.plan.microbatches)
        if not set(samples) <= self._loaded:
            kept = {role: self._crew.read(role) for role in (PARAM, BUFFER, STATE)}
            self._load(self._loaded | set(samples), kept)
        counted = self._captured.has_count
        request = StepRequest(
            schedule=self._schedule(len(samples), update),
            samples=samples,
            feeds=tuple(_slices(leaves, samples)),
            loss_tangents=tuple(1.0 if counted else size / rows for size in samples),
            lr=self._optimizer.lr,
            number=self._steps + 1,
            seed=self._seed,
            grad_scale=None if counted else 1.0,
        )
        result = self._crew.step(request)
        self._timeline = replace(result.timeline, label=self.plan.label)
        self._steps += update
        if result.counts is not None:
            return sum(result.losses) / sum(result.counts)
        return sum(loss * size for loss, size in zip(result.losses, samples, strict=True)) / rows


_UPDATING = frozenset({Op.UPDATE, Op.SEND_TIED_PARAM, Op.RECV_TIED_PARAM})


def _rows(leaves: Mapping[str, Any]) -> int:
    return int(next(iter(leaves.values())).shape[0])


def _sizes(rows: int, microbatches: int) -> tuple[int, ...]:
    """Sizes of min(microbatches, rows) micro-batches; they differ by at most one."""
    count = min(microbatches, rows)
    return tuple(rows // count + (index < rows % count) for index in range(count))


def _slices(leaves: Mapping[str, Any], samples: Sequence[int]) -> Iterator[dict[str, Any]]:
    lo = 0
    for size in samples:
        yield {name: leaf[lo : lo + size] for name, leaf in leaves.items()}
        lo += size
