"""How training methods learn, in one table: `python -m hetpipe.bench.learning`.

Each method trains the same models, from the same weights, on the same mini-batches, with one update
per mini-batch; asynchronous methods train one stream that is flushed at its end alone. So validation
is done then, once. How quickly a method learns is told by the training losses that a stream gives
anyway: the first mini-batch by which the mean of the last `WINDOW` is at most the task's target. In
an asynchronous method that loss is of a forward through stages of unlike age.

Seconds are of this machine, whose cores the stages share, and count from the first mini-batch that
is handed in.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from hetpipe import optim
from hetpipe.bench.eager import Eager, micro_sizes
from hetpipe.bench.workload import Workload
from hetpipe.bench.zoo import load_workload
from hetpipe.capture import Captured
from hetpipe.cost.table import CostTable
from hetpipe.engine.crew import Crew
from hetpipe.engine.pipeline import Pipeline
from hetpipe.optim.rule import Optimizer
from hetpipe.plan.plan import Plan, StagePlan
from hetpipe.schedule.generators import generate, is_asynchronous, max_in_flight

STAGES = 4
SEEDS = 3
WINDOW = 10
"""Mini-batches that a training loss is averaged over."""


@dataclass(frozen=True)
class Method:
    """How a mini-batch is trained; without a schedule by plain torch, unpartitioned."""

    name: str
    schedule: str = ""
    weights: str = "flush"
    microbatches: int = 1


@dataclass(frozen=True)
class Task:
    """A model with an optimizer. `target` is the mean training loss that is to be reached."""

    model: str
    optimizer: Optimizer
    mini_batch: int
    steps: int
    target: float
    figure: str  # of validation

    @property
    def name(self) -> str:
        return f"{self.model}, {self.optimizer.name} at {self.optimizer.lr}"


@dataclass(frozen=True)
class Run:
    """One training: the loss of every mini-batch, when it was known, and the figure at the end."""

    losses: tuple[float, ...]
    times_s: tuple[float, ...]
    figure: float

    def reached(self, target: float) -> int | None:
        """How many mini-batches it took until the mean of the last `WINDOW` was `target`."""
        for count in range(WINDOW, len(self.losses) + 1):
            if statistics.fmean(self.losses[count - WINDOW : count]) <= target:
                return count
        return None


METHODS = (
    Method("unpartitioned"),
    Method("GPipe", "gpipe", microbatches=4),
    Method("PipeDream", "pipedream", "stash"),
    Method("2BW", "pipedream", "2bw", 4),
    Method("SpecTrain", "pipedream", "spectrain"),
    Method("PipeOptim", "pipedream", "pipeoptim"),
)

TASKS = (
    Task("digits", optim.sgd(lr=0.05, momentum=0.9), 64, 250, 0.3, "accuracy"),
    Task("digits", optim.adamw(lr=3e-3), 64, 250, 0.3, "accuracy"),
    Task("lstm", optim.adam(lr=1e-2), 16, 100, 4.5, "perplexity"),
)


def seeded(model: str, seed: int) -> Workload:
    """The workload with weights of that seed."""
    workload = load_workload(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return replace(workload, model=type(workload.model)())


def by_layers(
    captured: Captured, members: Sequence[str], cuts: Sequence[int], mini_batch: int, method: Method
) -> tuple[Plan, CostTable]:
    """A plan with these cuts, without prices: nothing is profiled."""
    samples = mini_batch // method.microbatches
    names = tuple(layer.name for layer in captured.layer_graph(samples).layers)
    count, ends = len(members), [0, *cuts, len(names)]
    mini_batches = 2 * count if is_asynchronous(method.schedule) else 1
    rows = generate(method.schedule, count, method.microbatches, mini_batches=mini_batches)
    stages = tuple(
        StagePlan(lo, hi, (member,), depth, 0.0, 0.0, 0.0, 0, 0)
        for lo, hi, member, depth in zip(ends, ends[1:], members, max_in_flight(rows), strict=False)
    )
    plan = Plan(
        captured.name, names, stages, method.schedule, mini_batch, method.microbatches, 0.0,
        (0,) * (count - 1), "measured", "user", weights=method.weights,
    )  # fmt: skip
    return plan, CostTable(captured.name, samples, (), {})


def learn(
    task: Task, method: Method, seed: int, crew: Crew, captured: Captured, workload: Workload
) -> Run:
    batches = islice(workload.batches(task.mini_batch, seed), task.steps)
    if not method.schedule:
        import copy

        workload = replace(workload, model=copy.deepcopy(workload.model))
        eager = Eager(workload.model, workload.loss_fn, task.optimizer)
        sizes = micro_sizes(task.mini_batch, method.microbatches)
        losses, times_s = timed(eager.step(x, y, sizes) for x, y in batches)
    else:
        layers = len(captured.layer_graph(task.mini_batch // method.microbatches).layers)
        members = crew.cluster.ids
        cuts = [layers * n // len(members) for n in range(1, len(members))]
        plan, costs = by_layers(captured, members, cuts, task.mini_batch, method)
        example = next(workload.batches(task.mini_batch, seed))
        with Pipeline(
            workload.model,
            workload.loss_fn,
            example,
            cluster=crew.cluster,
            crew=crew,
            optimizer=task.optimizer,
            plan=plan,
            costs=costs,
            captured=captured,
        ) as pipe:
            losses, times_s = timed(result.loss for result in pipe.run(batches))
            import copy

            workload = replace(workload, model=copy.deepcopy(workload.model))
            workload.model.load_state_dict(pipe.state_dict())
    try:
        figure = workload.validate(workload.model)[task.figure]
    except OverflowError:
        figure = math.inf
    return Run(losses, times_s, figure)


def timed(losses: Iterable[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    begin_s = time.perf_counter()
    found = [(loss, time.perf_counter() - begin_s) for loss in losses]
    return tuple(loss for loss, _ in found), tuple(time_s for _, time_s in found)
