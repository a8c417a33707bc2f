"""Trials: trainings by a method, in stages or unpartitioned, with plans that need no profile."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import torch

from hetpipe.capture.captured import Captured
from hetpipe.cost.table import CostTable
from hetpipe.pipeline.batches import micro_sizes
from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.schedule.rule import is_asynchronous
from hetpipe.train.eager import Eager
from hetpipe.zoo.data import seeded
from hetpipe.zoo.digits import DigitsNet
from hetpipe.zoo.load import load_workload
from hetpipe.zoo.lstm import Recurrent
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    from hetpipe.crew.crew import Crew
    from hetpipe.optim.rule import Optimizer

MODELS: dict[str, type[torch.nn.Module]] = {"digits": DigitsNet, "lstm": Recurrent}
"""The classes of the models, by name of the workload; a new object has new random weights."""
WINDOW = 10
"""Number of mini-batches in a mean of training losses."""

Timed = tuple[tuple[float, ...], tuple[float, ...]]
"""Losses, and the seconds from the beginning to each loss."""


@dataclass(frozen=True)
class Method:
    """A method of training; without a schedule it is plain, unpartitioned torch."""

    name: str
    schedule: str = ""
    weights: str = "flush"
    microbatches: int = 1


@dataclass(frozen=True)
class Task:
    """A workload, the settings of its training, and the mean training loss to reach.

    `figure` names a validation figure of the workload. Without `cuts`, the stages have equal
    numbers of layers.
    """

    model: str
    optimizer: Optimizer
    mini_batch: int
    steps: int
    target: float
    figure: str
    methods: tuple[Method, ...]
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trial:
    """The loss and the time of every mini-batch, and the validation figure at the end."""

    losses: tuple[float, ...]
    times_s: tuple[float, ...]
    figure: float

    def reached(self, target: float) -> int | None:
        """Return after how many mini-batches a mean of `WINDOW` losses met the target, or None."""
        for count in range(WINDOW, len(self.losses) + 1):
            if statistics.fmean(self.losses[count - WINDOW : count]) <= target:
                return count
        return None


class Subject:
    """A model with weights from a seed, which is captured once for all trials."""

    def __init__(self, model: str, mini_batch: int, seed: int) -> None:
        self._seed = seed
        self._workload = seeded_workload(model, seed)
        example = next(self._workload.batches(mini_batch, seed))
        self._captured = Captured(self._workload.model, self._workload.loss_fn, example)

    def trial(self, task: Task, method: Method, crew: Crew) -> Trial:
        """Train a copy of the model; a method without a schedule does not use the crew."""
        workload = replace(self._workload, model=copy.deepcopy(self._workload.model))
        if method.schedule:
            losses, times_s = self._staged(workload, task, method, crew)
        else:
            losses, times_s = self._plain(workload, task, method)
        assert workload.validate is not None
        return Trial(losses, times_s, workload.validate(workload.model)[task.figure])

    def _plain(self, workload: Workload, task: Task, method: Method) -> Timed:
        batches = islice(workload.batches(task.mini_batch, self._seed), task.steps)
        eager = Eager(workload.model, workload.loss_fn, task.optimizer)
        sizes = micro_sizes(task.mini_batch, method.microbatches)
        return timed(eager.step(x, y, sizes) for x, y in batches)

    def _staged(self, workload: Workload, task: Task, method: Method, crew: Crew) -> Timed:
        batches = workload.batches(task.mini_batch, self._seed)
        example = next(workload.batches(task.mini_batch, self._seed))
        plan, costs = unprofiled(self._captured, crew.cluster.ids, task, method)
        with Pipeline(
            workload.model, workload.loss_fn, example, cluster=crew.cluster, crew=crew,
            optimizer=task.optimizer, plan=plan, costs=costs, captured=self._captured,
            seed=self._seed,
        ) as pipe:  # fmt: skip
            timed_losses = timed(result.loss for result in pipe.run(islice(batches, task.steps)))
            workload.model.load_state_dict(pipe.state_dict())
        return timed_losses


def timed(losses: Iterable[float]) -> Timed:
    """Return the losses, and the seconds from the call to each loss."""
    begin_s = time.perf_counter()
    pairs = [(loss, time.perf_counter() - begin_s) for loss in losses]
    return tuple(loss for loss, _ in pairs), tuple(time_s for _, time_s in pairs)


def seeded_workload(model: str, seed: int) -> Workload:
    """Return the workload named `model`, with weights from `seed`."""
    return replace(load_workload(model), model=seeded(MODELS[model], seed))


def unprofiled(
    captured: Captured, members: Sequence[str], task: Task, method: Method
) -> tuple[Plan, CostTable]:
    """Return a plan with a stage per member, and an empty table of costs."""
    samples = task.mini_batch // method.microbatches
    names = tuple(layer.name for layer in captured.layer_graph(samples).layers)
    count = len(members)
    cuts = task.cuts or [len(names) * n // count for n in range(1, count)]
    mini_batches = 2 * count if is_asynchronous(method.schedule) else 1
    rows = generate(method.schedule, count, method.microbatches, mini_batches=mini_batches)
    spans = pairwise([0, *cuts, len(names)])
    stages = tuple(
        StagePlan(lo, hi, (member,), in_flight, 0.0, 0.0, 0.0, 0, 0)
        for (lo, hi), member, in_flight in zip(spans, members, max_in_flight(rows), strict=True)
    )
    plan = Plan(
        captured.name, names, stages, method.schedule, task.mini_batch, method.microbatches, 0.0,
        (0,) * (count - 1), "measured", "user", weights=method.weights,
    )  # fmt: skip
    return plan, CostTable(captured.name, samples, (), {})
