"""Rows of the benchmark: all rows train on the same mini-batches, and each records its times."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from hetpipe.bench.peer import PeerTorch, cores_of, equal_counts
from hetpipe.bench.plain import PlainTorch
from hetpipe.crew.crew import Crew
from hetpipe.pipeline.batches import micro_sizes
from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.profile.drift import mean_correction
from hetpipe.train.training import one_thread, torch_losses, train
from hetpipe.zoo.load import optimizer_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hetpipe.capture.captured import Captured
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.cost.table import CostTable
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.drift import Correction
    from hetpipe.zoo.workload import Workload


@dataclass(frozen=True)
class Pace:
    """Numbers of steps: in a turn `warm_up` untimed steps, then `timed` steps.

    The losses of the first `checked` steps are compared with torch's.
    """

    warm_up: int = 3  # caches and pages are cold after the turns of other rows
    timed: int = 4
    checked: int = 20

    @staticmethod
    def of(step_s: float, timed: int | None = None) -> Pace:
        """Return numbers of steps that suit steps of `step_s` seconds, or a given `timed`."""

        def within(seconds: float, least: int, most: int) -> int:
            return max(least, min(most, round(seconds / step_s)))

        return Pace(within(0.4, 1, 3), timed or within(0.8, 1, 4), within(1.5, 4, 20))


@dataclass
class Task:
    """The data that the rows on one cluster share; `workload` was loaded by the name `model`."""

    model: str
    workload: Workload
    captured: Captured
    cluster: Cluster
    mini_batch: int
    seed: int
    pace: Pace = field(default_factory=Pace)
    tables: dict[int, CostTable] = field(default_factory=dict)  # by micro-batch size
    torch_losses: dict[tuple[int, ...], tuple[float, ...]] = field(default_factory=dict)

    def expected(self, microbatches: int) -> tuple[float, ...]:
        """Return the first losses of unpartitioned torch, in `microbatches` micro-batches."""
        sizes = micro_sizes(self.mini_batch, microbatches)
        if sizes not in self.torch_losses:
            self.torch_losses[sizes] = torch_losses(
                self.workload, sizes, self.pace.checked, self.seed
            )
        return self.torch_losses[sizes]


class Row(ABC):
    """One line of the table; its processes live until `close`."""

    name: str
    label: str  # measured | emulated
    microbatches: int

    def __init__(self, task: Task) -> None:
        self.task = task
        self.steps_s: list[float] = []

    @abstractmethod
    def step_s(self) -> float:
        """Run a turn and return the mean seconds of its timed steps."""

    @abstractmethod
    def close(self) -> None:
        """End the row's processes."""

    def measure(self) -> None:
        """Run one turn and record its time."""
        self.steps_s.append(self.step_s())

    @property
    def rate(self) -> float:
        """The samples per second, as the median over rounds."""
        return statistics.median(self.rates)

    @property
    def rates(self) -> list[float]:
        """The samples per second of every round."""
        return [self.task.mini_batch / time_s for time_s in self.steps_s]

    def to_json(self) -> dict[str, Any]:
        """Return the figures of the row: median, lowest and highest rate, and all rounds."""
        return {
            "name": self.name,
            "label": self.label,
            "microbatches": self.microbatches,
            "samples_per_s": self.rate,
            "samples_per_s_min": min(self.rates),
            "samples_per_s_max": max(self.rates),
            "rounds": self.rates,
        }


class TorchRow(Row):
    """Torch without hetpipe, with the quickest of several numbers of micro-batches."""

    label = "measured"

    def __init__(
        self, task: Task, name: str, torch: PlainTorch | PeerTorch, counts: Sequence[int]
    ) -> None:
        super().__init__(task)
        self.name = name
        self._torch = torch
        try:
            trial = max(1, task.pace.timed // 2)
            trials_s = {count: torch.step_s(count, trial, warm_up=1) for count in counts}
        except BaseException:
            self.close()
            raise
        self.microbatches = min(trials_s, key=lambda count: trials_s[count])

    def step_s(self) -> float:
        pace = self.task.pace
        return self._torch.step_s(self.microbatches, pace.timed, pace.warm_up)

    def close(self) -> None:
        self._torch.close()


class PlainRow(TorchRow):
    """Plain torch on given cores."""

    def __init__(self, task: Task, cores: Sequence[int], counts: Sequence[int]) -> None:
        self.threads = len(cores)
        name = f"plain torch, {self.threads} thread{'s' if self.threads > 1 else ''}"
        super().__init__(
            task, name, PlainTorch(task.model, task.mini_batch, task.seed, cores), counts
        )


class PeerRow(TorchRow):
    """Torch's own pipeline on the cluster's cores."""

    def __init__(self, task: Task, counts: Sequence[int]) -> None:
        cores = cores_of(task.cluster)
        super().__init__(
            task,
            f"torch.distributed.pipelining, {len(cores)} processes",
            PeerTorch(task.model, task.mini_batch, task.seed, cores),
            equal_counts(task.mini_batch, len(cores), counts),
        )


class PipelineRow(Row):
    """A plan that runs on a separate crew. The constructor compares its losses with torch's.

    An asynchronous plan trains with older weights, so its losses need only be finite.
    """

    def __init__(self, task: Task, name: str, plan: Plan) -> None:
        super().__init__(task)
        self.name = name
        self.plan = plan
        self.corrections: list[tuple[Correction, Correction]] = []  # before and after each turn
        self._batches = task.workload.batches(task.mini_batch, task.seed)
        cluster = _only(task.cluster, [name for stage in plan.stages for name in stage.devices])
        self._crew = Crew.start(cluster)
        try:
            self.pipe = self._open(cluster)
            self.difference: float | None = None
            if plan.rule.flushes:
                self.difference = self._check()
            else:
                self._stream_step_s()  # raises an error if a loss is not finite
        except BaseException:
            self.close()
            raise
        self.label = self.plan.label
        self.microbatches = self.plan.microbatches

    def step_s(self) -> float:
        pace = self.task.pace
        if not self.plan.rule.flushes:
            return self._stream_step_s()
        with one_thread():
            fed = list(islice(self._batches, pace.warm_up + pace.timed))
            for x, y in fed[: pace.warm_up]:
                self.pipe.step(x, y)
            begin_s = time.perf_counter()
            for x, y in fed[pace.warm_up :]:
                self.pipe.step(x, y)
            return (time.perf_counter() - begin_s) / pace.timed

    def measure(self) -> None:
        before = self.pipe.corrected()
        super().measure()
        self.corrections.append((before, self.pipe.corrected()))

    @property
    def measured_s(self) -> float:
        """The seconds of a step, as the median over rounds."""
        return self.task.mini_batch / self.rate

    @property
    def correction(self) -> Correction:
        """The prediction of the row's step, corrected for drift.

        The probes before and after each turn correct the prediction for that turn. The mean of
        these predictions is for the mean step, so it is scaled to the median step.
        """
        turns = [mean_correction(pair) for pair in self.corrections]
        return mean_correction(turns).scaled(self.measured_s / statistics.fmean(self.steps_s))

    def close(self) -> None:
        self._crew.close()

    def to_json(self) -> dict[str, Any]:
        correction = self.correction
        return {
            **super().to_json(),
            "predicted_step_s": self.plan.step_s,
            "corrected_step_s": correction.corrected_s,
            "corrected_rounds_s": [mean_correction(pair).corrected_s for pair in self.corrections],
            "interval_s": correction.interval_s,
            "drifts": correction.drifts,
            "measured_step_s": self.measured_s,
            "max_loss_rel_diff": self.difference,
            "plan": self.plan.to_json(),
        }

    def _open(self, cluster: Cluster) -> Pipeline:
        task, plan = self.task, self.plan
        return Pipeline(
            task.workload.model,
            task.workload.loss_fn,
            next(task.workload.batches(task.mini_batch, task.seed)),
            cluster=cluster,
            optimizer=optimizer_of(task.workload),
            plan=plan,
            costs=task.tables[min(task.tables, key=lambda n: abs(n - plan.share_samples))],
            seed=task.seed,
            captured=task.captured,
            crew=self._crew,
        )

    def _stream_step_s(self) -> float:
        """Return the mean seconds between two results of a new stream, once the pipeline is full.

        Each turn opens a new stream, because an open one would compute during other rows' turns.
        """
        pace = self.task.pace
        with one_thread(), closing(self.pipe.run(self._batches)) as results:
            for _ in range(pace.warm_up + max(self.plan.in_flight)):
                next(results)
            begin_s = time.perf_counter()
            for _ in range(pace.timed):
                next(results)
            return (time.perf_counter() - begin_s) / pace.timed

    def _check(self) -> float:
        """Return the largest relative difference from unpartitioned torch over the first steps."""
        expected = self.task.expected(self.plan.microbatches)
        steps = train(
            self.task.workload, self.pipe, len(expected), seed=self.task.seed, expected=expected
        )
        return max(step.difference for step in steps)


class AtOnceRow(Row):
    """All devices at the same time, each with the whole model; the rate is the sum of their rates.

    Devices that share a bus or a processor's clock are slower together than one after the other.
    """

    name = "all alone, at once"
    label = "measured"

    def __init__(self, task: Task, alone: Sequence[PipelineRow]) -> None:
        super().__init__(task)
        self.microbatches = max(row.microbatches for row in alone)
        self.label = next((row.label for row in alone if row.label != self.label), self.label)
        self._alone = alone

    def step_s(self) -> float:
        """Return the seconds per mini-batch at the sum of the rates, while all devices train."""
        pace = self.task.pace
        window_s = pace.timed * max(row.plan.step_s for row in self._alone)
        batches = list(islice(self.task.workload.batches(self.task.mini_batch, self.task.seed), 8))

        def warm_up(row: PipelineRow) -> None:
            for x, y in batches[: pace.warm_up]:
                row.pipe.step(x, y)

        def rate(row: PipelineRow) -> float:
            begin_s = time.perf_counter()
            end_s, count = begin_s, 0
            while end_s < begin_s + window_s:  # keeps all devices busy until the end
                row.pipe.step(*batches[count % len(batches)])
                end_s, count = time.perf_counter(), count + 1
            return count / (end_s - begin_s)

        with one_thread(), ThreadPoolExecutor(len(self._alone)) as pool:
            list(pool.map(warm_up, self._alone))  # raises the first error
            return 1 / sum(pool.map(rate, self._alone))

    def close(self) -> None:
        """Do nothing: the processes belong to the rows of single devices."""


def _only(cluster: Cluster, used: Sequence[str]) -> Cluster:
    """Return the cluster with only the members in `used`: idle workers also take core time."""
    return replace(
        cluster,
        members=tuple(member for member in cluster.members if member.id in used),
        links={pair: link for pair, link in cluster.links.items() if pair <= set(used)},
    )
