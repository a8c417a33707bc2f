"""A device that slows in mid-run, and recovers: `python -m hetpipe.papers.rebalance`.

Two torch workers train a model under `rebalance="auto"`. One of them is slowed, by an emulated
speed or by a process that computes on its core, and left alone again. Beside the throughput of
every ten steps stands that of a plan that is made afresh for the speeds of that time.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from hetpipe.bench.training import train
from hetpipe.capture import Captured
from hetpipe.cluster.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.zoo.load import load_workload, optimizer_of
from hetpipe.zoo.workload import Workload

DEVICE = "pytorch:cpu:0"
SLOW = 0.4
PHASE = 60
GROUP = 10
"""Steps in a line of the table."""
BACK = 0.9
"""The share of the best plan's throughput at which a training is back."""
SEED = 0

Slow = Callable[[bool], None]
"""Slow a member down, or leave it alone again."""


class Trainings:
    """Trainings of one model on one crew, captured once."""

    def __init__(self, model: str, crew: Crew, options: dict[str, Any]) -> None:
        self.workload = load_workload(model)
        self.crew, self._options = crew, options
        self._example = next(self.workload.batches(self.workload.mini_batch, SEED))
        own = self.workload
        self._captured = Captured(own.model, own.loss_fn, self._example)

    def pipeline(self, **options: Any) -> tuple[Workload, Pipeline]:
        """A pipeline for a copy of the model, planned for the present speeds."""
        own = replace(self.workload, model=copy.deepcopy(self.workload.model))
        pipe = Pipeline(
            own.model, own.loss_fn, self._example, cluster=self.crew.cluster, crew=self.crew,
            captured=self._captured, optimizer=optimizer_of(own), **self._options, **options,
        )  # fmt: skip
        return own, pipe

    def rates(self, phases: int, length: int, slow: Slow) -> list[float]:
        """Samples per second of each group of steps under `auto`; every second phase is slow."""
        workload, pipe = self.pipeline(rebalance="auto")
        times_s: list[float] = []
        with pipe:
            for step in train(workload, pipe, phases * length, seed=SEED):
                times_s.append(step.time_s)
                if len(times_s) % length == 0:
                    slow(len(times_s) // length % 2 == 1 and len(times_s) < phases * length)
        groups = range(0, len(times_s), GROUP)
        return [workload.mini_batch / median(times_s[n : n + GROUP]) for n in groups]

    def best(self) -> float:
        """Samples per second of a plan that is made for the present speeds."""
        workload, pipe = self.pipeline()
        with pipe:
            times_s = [step.time_s for step in train(workload, pipe, 4 * GROUP, seed=SEED)]
        return workload.mini_batch / median(times_s[GROUP:])


@contextmanager
def neighbour(core: int) -> Iterator[Slow]:
    """A process that computes on a core, when it is told to."""
    processes: list[subprocess.Popen[bytes]] = []

    def slow(on: bool) -> None:
        while processes:
            processes[-1].kill()
            processes.pop().wait()
        if on:
            spin = f"import os\nos.sched_setaffinity(0, [{core}])\nwhile True: pass"
            processes.append(subprocess.Popen([sys.executable, "-c", spin]))

    try:
        yield slow
    finally:
        slow(False)


@contextmanager
def emulated(crew: Crew, member: str) -> Iterator[Slow]:
    """A member at an emulated speed, when it is told to."""
    yield lambda on: crew.set_speed(member, SLOW if on else 1.0)
    crew.set_speed(member, 1.0)


def table_of(rates: Sequence[float], bests: Sequence[float], length: int) -> Iterator[str]:
    """Lines: the steps, their throughput, and its share of the best plan's for that phase."""
    yield "    steps   samples/s   best plan   share"
    for number, rate in enumerate(rates):
        best = bests[number * GROUP // length % 2]
        first = number * GROUP
        yield f"{first:4d}..{first + GROUP - 1:<4d} {rate:9.1f} {best:11.1f} {rate / best:7.2f}"
    for change in range(length, len(rates) * GROUP, length):
        best = bests[change // length % 2]
        since = range(change // GROUP, min(change + length, len(rates) * GROUP) // GROUP)
        back = next((n for n in since if rates[n] >= BACK * best), None)
        when = (
            "not in this phase" if back is None else f"within {(back + 1) * GROUP - change} steps"
        )
        yield f"change at step {change}: back at {BACK:.2f} of the best plan {when}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="hetpipe papers rebalance", description=__doc__)
    parser.add_argument("--model", default="digits", help="a model of the zoo")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=PHASE, help=f"of each phase ({PHASE})")
    parser.add_argument(
        "--neighbour", action="store_true", help="a process on its core, no emulated speed"
    )
    asked = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hetpipe").setLevel(logging.INFO)
    cluster = Cluster.local(devices=[DEVICE, DEVICE])
    first = cluster.members[0]
    options = {
        "schedule": asked.schedule, "weights": asked.weights, "microbatches": asked.microbatches
    }  # fmt: skip
    with Crew.start(cluster) as crew:
        trainings = Trainings(asked.model, crew, options)
        core = (*first.cores, *sorted(os.sched_getaffinity(0)))[0]
        with neighbour(core) if asked.neighbour else emulated(crew, first.id) as slow:
            rates = trainings.rates(3, asked.steps, slow)
            bests = [trainings.best()]
            slow(True)
            bests.append(trainings.best())
            slow(False)
    kind = "a process on its core" if asked.neighbour else f"an emulated speed of {SLOW}"
    print(f"{asked.model}, {asked.schedule}, {first.id} slowed by {kind}")
    print(*table_of(rates, bests, asked.steps), sep="\n")


if __name__ == "__main__":
    main()
