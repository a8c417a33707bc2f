"""A device that slows down during a run, and recovers: `python -m hetpipe.papers.rebalance`.

Two torch workers train a model with `rebalance="auto"`. One worker slows down, by an emulated speed
or because another process computes on its core, and later recovers. A second pair of workers on the
same cores slows down and recovers at the same time, but gets a new plan for each phase: before,
during and after. The two trainings take turns, so that other work on the machine affects both.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

from hetpipe.capture.captured import Captured
from hetpipe.cluster.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.train.training import train
from hetpipe.zoo.load import load_workload, optimizer_of
from hetpipe.zoo.workload import Workload

DEVICE = "pytorch:cpu:0"
SLOW = 0.4
PHASE = 60
GROUP = 10
"""Steps in a line of the table."""
BACK = 0.9
"""A training has recovered at this share of the throughput of the phase's plan."""
SEED = 0

Slow = Callable[[bool], None]
"""Slows a member down (True), or lets it recover (False)."""


class Trainings:
    """Two trainings of one model, which is captured once: on `crew` and on `fresh`."""

    def __init__(self, model: str, crew: Crew, fresh: Crew, options: dict[str, Any]) -> None:
        self._workload = load_workload(model)
        self._crew, self._fresh, self._options = crew, fresh, options
        self._example = next(self._workload.batches(self._workload.mini_batch, SEED))
        own = self._workload
        self._captured = Captured(own.model, own.loss_fn, self._example)

    def rates(self, phases: int, length: int, slow: Slow) -> list[tuple[float, float]]:
        """Return, by group of steps, the samples/s with `auto` and with the phase's plan."""
        workload, pipe = self._pipeline(self._crew, rebalance="auto")
        times_s: list[tuple[float, float]] = []
        with pipe:
            steps = train(workload, pipe, phases * length, seed=SEED)
            for phase in range(phases):
                slow(phase % 2 == 1)
                other, planned = self._pipeline(self._fresh)
                with planned:
                    others = train(other, planned, length, seed=SEED)
                    pairs = zip(itertools.islice(steps, length), others, strict=True)
                    times_s += [(step.time_s, best.time_s) for step, best in pairs]
        groups = [list(zip(*times_s[n : n + GROUP], strict=True))
                  for n in range(0, len(times_s), GROUP)]  # fmt: skip
        rates = [[workload.mini_batch / median(own) for own in group] for group in groups]
        return [(auto, best) for auto, best in rates]

    def _pipeline(self, crew: Crew, **options: Any) -> tuple[Workload, Pipeline]:
        """Return a copy of the workload, and a pipeline planned for the present speeds."""
        own = replace(self._workload, model=copy.deepcopy(self._workload.model))
        pipe = Pipeline(
            own.model, own.loss_fn, self._example, cluster=crew.cluster, crew=crew,
            captured=self._captured, optimizer=optimizer_of(own), **self._options, **options,
        )  # fmt: skip
        return own, pipe


@contextmanager
def neighbour(core: int) -> Iterator[Slow]:
    """Yield a function that starts (True) or ends (False) a process that computes on a core."""
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
def emulated(crews: Sequence[Crew], member: str) -> Iterator[Slow]:
    """Yield a function that sets (True) or resets (False) a member's speed in each crew."""

    def slow(on: bool) -> None:
        for crew in crews:
            crew.set_speed(member, SLOW if on else 1.0)

    yield slow


def table_of(rates: Sequence[tuple[float, float]], length: int) -> Iterator[str]:
    """Yield lines: steps, throughput, throughput of the phase's plan, and their ratio."""
    yield "    steps   samples/s   best plan   share"
    for number, (rate, best) in enumerate(rates):
        first = number * GROUP
        yield f"{first:4d}..{first + GROUP - 1:<4d} {rate:9.1f} {best:11.1f} {rate / best:7.2f}"
    for change in range(length, len(rates) * GROUP, length):
        since = range(change // GROUP, (change + length) // GROUP)
        back = next((n for n in since if rates[n][0] >= BACK * rates[n][1]), None)
        when = (
            "not in this phase" if back is None else f"within {(back + 1) * GROUP - change} steps"
        )
        yield f"change at step {change}: back at {BACK:.2f} of the best plan {when}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="hetpipe papers rebalance", description=__doc__)
    parser.add_argument("--model", default="digits", help="a model of the zoo")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=PHASE, help=f"steps in a phase ({PHASE})")
    parser.add_argument(
        "--neighbour", action="store_true", help="slow the worker by a process on its core"
    )
    asked = parser.parse_args(arguments)
    if asked.steps < GROUP or asked.steps % GROUP:
        parser.error(f"--steps {asked.steps}: give a multiple of {GROUP}")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hetpipe").setLevel(logging.INFO)
    cluster = Cluster.local(devices=[DEVICE, DEVICE])
    first = cluster.members[0]
    options = {
        "schedule": asked.schedule, "weights": asked.weights, "microbatches": asked.microbatches
    }  # fmt: skip
    with Crew.start(cluster) as crew, Crew.start(cluster) as fresh:
        trainings = Trainings(asked.model, crew, fresh, options)
        core = (*first.cores, *sorted(os.sched_getaffinity(0)))[0]
        slowing = neighbour(core) if asked.neighbour else emulated([crew, fresh], first.id)
        with slowing as slow:
            rates = trainings.rates(3, asked.steps, slow)
    kind = "a process on its core" if asked.neighbour else f"an emulated speed of {SLOW}"
    print(f"{asked.model}, {asked.schedule}, {first.id} slowed by {kind}")
    print(*table_of(rates, asked.steps), sep="\n")


if __name__ == "__main__":
    main()
