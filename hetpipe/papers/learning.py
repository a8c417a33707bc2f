"""A comparison of how training methods learn: `python -m hetpipe.papers.learning [--devices]`.

Each method trains the same models from the same weights on the same mini-batches, with one update
per mini-batch. A validation flushes a pipeline, which would change an asynchronous method. So every
method is validated only once, at the end. Training losses, which need no flush, show the speed of
learning. The speed is the number of mini-batches until the mean loss of the last `WINDOW`
mini-batches is at most the task's target. The target is a fixed number, which unpartitioned
training reaches about half way. An asynchronous method computes its loss with weights of a
different age in each stage.

The batch norms of `digits` take their statistics over a micro-batch. So compare a method with the
unpartitioned training that has as many micro-batches per mini-batch (column M).

Seconds count from the first mini-batch. Stages share the cores of this machine, so the times say
nothing about a cluster. With `--devices`, `digits` runs on torch, PoCL and the FPGA emulator.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hetpipe import optim
from hetpipe.bench.machine import describe
from hetpipe.cluster.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError
from hetpipe.files import write_json
from hetpipe.papers.footprint import crew_of
from hetpipe.papers.trial import WINDOW, Method, Subject, Task, Trial
from hetpipe.report.tables import Table, console
from hetpipe.train.training import one_thread

VERSION = 1
"""Version of the JSON format."""
STAGES = 4
SEEDS = 3
FIGURES = {"accuracy": ("accuracy, %", 100.0), "perplexity": ("perplexity", 1.0)}
"""For each validation figure its heading in the table, and the factor to the heading's unit."""

UNPARTITIONED = Method("unpartitioned")
IN_MICROBATCHES = Method("unpartitioned", microbatches=4)
GPIPE = Method("GPipe", "gpipe", microbatches=4)
PIPEDREAM = Method("PipeDream", "pipedream", "stash")
TWO_BUFFERED = Method("2BW", "pipedream", "2bw", 4)
SPECTRAIN = Method("SpecTrain", "pipedream", "spectrain")
PIPEOPTIM = Method("PipeOptim", "pipedream", "pipeoptim")
ANY_OPTIMIZER = (UNPARTITIONED, IN_MICROBATCHES, GPIPE, PIPEDREAM, TWO_BUFFERED, PIPEOPTIM)

# At the learning rates of `TASKS`, old weights do visible harm and unpartitioned training still
# learns well. All tried rates, with seed 0: digits with SGD at 0.01, 0.03, 0.05, 0.1 and 0.2 and
# with AdamW at 1e-3, 3e-3 and 1e-2; lstm with Adam at 2e-3, 5e-3, 1e-2 and 2e-2.
TASKS = (
    Task(
        "digits", optim.sgd(lr=0.05, momentum=0.9), 64, 110, 0.05, "accuracy",
        (*ANY_OPTIMIZER, SPECTRAIN),
    ),
    Task("digits", optim.adamw(lr=3e-3), 64, 110, 0.05, "accuracy", ANY_OPTIMIZER),
    Task("lstm", optim.adam(lr=5e-3), 16, 100, 4.5, "perplexity", ANY_OPTIMIZER),
)  # fmt: skip

DEVICES = ("pytorch:cpu:0", "opencl:pocl:0", "opencl:intel-fpga-emulator:0")
# Five epochs, at a learning rate at which old weights do little harm. The emulator gets the last
# convolution, the pooling and the linear layer.
ON_DEVICES = Task(
    "digits", optim.sgd(lr=0.01, momentum=0.9), 64, 110, 0.05, "accuracy",
    (UNPARTITIONED, PIPEOPTIM), (5, 11),
)  # fmt: skip


@dataclass(frozen=True)
class Trials:
    """The trials of a method on a task, with the seeds 0, 1, ..."""

    task: Task
    method: Method
    trials: tuple[Trial, ...]

    def to_json(self) -> dict[str, Any]:
        """Return all measurements as a dict for JSON."""
        rule = {"name": self.task.optimizer.name, "lr": self.task.optimizer.lr}
        kept = {"model": self.task.model, "mini_batch": self.task.mini_batch}
        kept |= {"target": self.task.target, "figure": self.task.figure}
        trials = [asdict(trial) for trial in self.trials]
        return kept | {"optimizer": rule, "method": asdict(self.method), "trials": trials}


def measure(tasks: Iterable[Task], seeds: int, crew: Crew) -> list[Trials]:
    """Measure all methods of all tasks for each seed; print progress on standard error."""
    subjects: dict[tuple[str, int, int], Subject] = {}
    rows = []
    for task in tasks:
        trials: dict[Method, list[Trial]] = {method: [] for method in task.methods}
        for seed in range(seeds):
            key = (task.model, task.mini_batch, seed)
            if key not in subjects:
                subjects[key] = Subject(*key)
            for method in task.methods:
                trial = subjects[key].trial(task, method, crew)
                trials[method].append(trial)
                print(
                    f"{task.model}, {task.optimizer.name}, seed {seed}, {method.name}, "
                    f"M = {method.microbatches}: {trial.times_s[-1]:.1f} s",
                    file=sys.stderr,
                )
        rows += [Trials(task, method, tuple(of_method)) for method, of_method in trials.items()]
    return rows


def learning_table(rows: Sequence[Trials], crew: Crew) -> Table:
    """Return a table with a line for each method, below a line for its task and target."""
    infos = crew.infos.values()
    emulated = any(info.capabilities.emulated for info in infos)
    title = (
        f"{len(infos)} stages on {', '.join(dict.fromkeys(info.id for info in infos))}; "
        f"mean (min .. max) over seeds 0 to {len(rows[0].trials) - 1}"
    )
    times = f"s to target,\n{'emulated' if emulated else 'measured'}"
    numbers = ("M", "at the end", "mini-batches\nto target", times)
    table = Table(title, ("method", *numbers), numbers)
    task = None
    for row in rows:
        if row.task != task:
            task = row.task
            head = f"{task.model}, {task.optimizer.name}\nrate {task.optimizer.lr}"
            target = f"loss {task.target},\nat most {task.steps}"
            table.add_section()
            table.add_row(head, "", FIGURES[task.figure][0], target, style="bold")
        table.add_row(*_cells(row))
    return table


def spread(values: Sequence[float], digits: int, of: int) -> str:
    """Return `mean (min .. max)` of the values of `of` trials.

    If a trial has no value: `2 of 3: min .. max`, or `never`.
    """
    if not values:
        return "never"
    ends = f"{min(values):.{digits}f} .. {max(values):.{digits}f}"
    if len(values) < of:
        return f"{len(values)} of {of}: {ends}"
    return f"{statistics.fmean(values):.{digits}f} ({ends})"


def _cells(row: Trials) -> tuple[str, ...]:
    task, of = row.task, len(row.trials)
    reached = [(trial, trial.reached(task.target)) for trial in row.trials]
    hits = [(trial, count) for trial, count in reached if count is not None]
    return (
        row.method.name,
        str(row.method.microbatches),
        spread([FIGURES[task.figure][1] * trial.figure for trial in row.trials], 1, of),
        spread([count for _, count in hits], 0, of),
        spread([trial.times_s[count - 1] for trial, count in hits], 0, of),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("hetpipe papers learning", description=__doc__)
    parser.add_argument("--steps", type=int, help="mini-batches per training")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    parser.add_argument("--devices", action="store_true", help="digits on three unlike devices")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or (options.steps is not None and options.steps < 1):
        parser.error("--seeds and --steps must be at least 1")
    tasks: Sequence[Task] = (ON_DEVICES,) if options.devices else TASKS
    if options.steps is not None:
        tasks = [replace(task, steps=options.steps) for task in tasks]
    try:
        # With more stages than cores, workers in this process are quicker than processes.
        local = not options.devices
        crew = crew_of(STAGES) if local else Crew.start(Cluster.local(devices=DEVICES))
        with one_thread(), crew:
            rows = measure(tasks, options.seeds, crew)
            console().print(learning_table(rows, crew))
        if options.json is not None:
            written = [row.to_json() for row in rows]
            head = {"version": VERSION, "machine": describe(), "window": WINDOW}
            write_json(options.json, {**head, "rows": written})
    except HetpipeError as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
