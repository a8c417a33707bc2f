"""Steps and memory with survive="auto" and without: see `benchmarks.survived`."""

from __future__ import annotations

import ctypes
import gc
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import hetpipe as hp
from benchmarks.stepmodels import Sizes
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import available_cores
from hetpipe.cost.table import CostTable
from hetpipe.pipeline.journal import Recorded
from hetpipe.pipeline.survival import Survival
from hetpipe.profile.clock import spread_of
from hetpipe.sdk.backend import Device
from hetpipe.train.training import one_thread
from hetpipe.words import words
from hetpipe.zoo.load import load_workload, optimizer_of
from hetpipe.zoo.workload import Workload

T = TypeVar("T")
DEVICE = "pytorch:cpu:0"
LARGE = Sizes(16384, 32, 768, 12, 12, 4)
"""A GPT with 98 million parameters."""
SAMPLES = {"digits": 128, "gpt": 16, "large": LARGE.samples}
OPTIONS: dict[str, Any] = {"schedule": "1f1b", "microbatches": 4}
WARM_UP = 8
SNAPSHOTS = 2
"""Snapshots in each block of steps."""
MEMORY_PAIRS = 5
OPENINGS = 4
"""Pairs of pipelines. Two pipelines of the same kind differ by some percent."""


def cpu_s(_: Device | None = None) -> float:
    """Return the CPU seconds of this process."""
    return time.process_time()


class Memory(NamedTuple):
    """Bytes of a process: its part of memory that processes share, and memory that it has alone."""

    shared_nbytes: float
    own_nbytes: float


def memory(_: Device | None = None) -> Memory:
    """Return the memory of this process.

    The allocator first returns free pages to the system: it keeps some MB more or less in each
    process, as much as the snapshots of a small model.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    kB = {name: float(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
    return Memory(1024 * kB["Pss_Shmem"], 1024 * kB["Pss_Anon"])


def of_all(pipe: hp.Pipeline, function: Callable[[], T]) -> list[T]:
    """Return the results of a function in this process and in the workers."""
    crew = pipe._training.setup.crew
    name = f"{function.__module__}:{function.__name__}"
    return [function(), *crew.call(list(crew.infos), name)]


def workload_of(model: str) -> Workload:
    """Return a workload by its name here."""
    return LARGE.gpt("gpt2") if model == "large" else load_workload(model)


def pinned(devices: Sequence[str]) -> Cluster:
    """Return a cluster whose workers take a core each, in turn."""
    cluster, cores = Cluster.local(devices=devices), available_cores()
    members = enumerate(cluster.members)
    return replace(
        cluster, members=tuple(replace(m, cores=(cores[n % len(cores)],)) for n, m in members)
    )


def opened(model: str, cluster: Cluster, **options: Any) -> hp.Pipeline:
    """Open a pipeline of a model, with the plan's options or a plan."""
    workload = workload_of(model)
    example = next(workload.batches(SAMPLES[model], 0))
    if "plan" not in options:
        options = {**OPTIONS, **options}
    return hp.Pipeline(
        workload.model, workload.loss_fn, example, cluster=cluster,
        optimizer=optimizer_of(workload), **options,
    )  # fmt: skip


def batches_of(model: str, count: int = 16) -> Iterator[tuple[Any, Any]]:
    """Yield a few mini-batches for ever."""
    return cycle([*islice(workload_of(model).batches(SAMPLES[model], 0), count)])


def costs_of(pipe: hp.Pipeline) -> CostTable:
    """Return the costs that a pipeline's plan was made with."""
    plan = pipe.plan
    return pipe._training.setup.tables[-(-plan.mini_batch // plan.microbatches)]


def survival_of(pipe: hp.Pipeline) -> Survival:
    """Return what keeps a pipeline alive."""
    assert pipe._survival is not None
    return pipe._survival


def fix_interval(pipe: hp.Pipeline) -> int:
    """Keep the number of mini-batches between two snapshots that the pipeline has chosen by now."""
    survival = survival_of(pipe)
    count = survival._every()
    survival._options = replace(survival._options, snapshot_every=count)
    return count


def block_s(pipe: hp.Pipeline, batches: Iterator[Any], steps: int) -> float:
    """Return the seconds of a step, over a run of some steps."""
    begin_s = time.perf_counter()
    for _ in pipe.run(islice(batches, steps)):
        pass
    return (time.perf_counter() - begin_s) / steps


def compare(
    pipes: Sequence[hp.Pipeline], batches: Iterator[Any], steps: int, end_s: float
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Yield the seconds and the CPU seconds of a step of both pipelines, by pairs of blocks, until
    a moment; one pair at least."""
    pair = 0
    while pair == 0 or time.monotonic() < end_s:
        times_s, busy_s = [0.0, 0.0], [0.0, 0.0]
        for number in (0, 1) if pair % 2 else (1, 0):
            before_s = sum(of_all(pipes[number], cpu_s))
            times_s[number] = block_s(pipes[number], batches, steps)
            busy_s[number] = (sum(of_all(pipes[number], cpu_s)) - before_s) / steps
        yield (times_s[0], times_s[1]), (busy_s[0], busy_s[1])
        pair += 1


@contextmanager
def counted(pipe: hp.Pipeline) -> Iterator[list[float]]:
    """Yield a list that gets the seconds of each snapshot, once a result comes after it."""
    survival, seen, took_s = survival_of(pipe), set[int](), list[float]()
    watch = pipe._training.watch

    def look(result: Any, samples: int) -> None:
        watch(result, samples)
        kept = survival._latest
        if id(kept) not in seen:
            seen.add(id(kept))
            took_s.append(kept.took_s)

    seen.add(id(survival._latest))
    pipe._training.watch = look
    yield took_s
    pipe._training.watch = watch


def main(model: str, minutes: float) -> None:
    """Print the added time of a step with snapshots, and the memory that they take."""
    with one_thread():
        with opened(model, pinned([DEVICE] * 2)) as plain:
            print(plain.plan, flush=True)
            options = {"plan": plain.plan, "costs": costs_of(plain)}
        openings = [steps_of(model, options, 60 * minutes / OPENINGS, n) for n in range(OPENINGS)]
    ratios = [ratio for opening in openings for ratio in opening.ratios]
    medians = [statistics.median(opening.ratios) for opening in openings]
    plain_s, with_s = (sum(each) for each in zip(*(o.busy_s for o in openings), strict=True))
    print(
        f"{model}: a snapshot every {words([o.every for o in openings])} mini-batches: "
        f"{100 * statistics.median(o.share for o in openings):.2f} % of the time\n"
        f"{model}: ratio {statistics.median(ratios):.4f} (spread {spread_of(ratios):.4f}, "
        f"{min(ratios):.4f} to {max(ratios):.4f}, {len(ratios)} pairs of blocks; medians of "
        f"{OPENINGS} pairs of pipelines {min(medians):.4f} to {max(medians):.4f}), of CPU "
        f"{with_s / plain_s:.4f}; bar 1.02 (measured)",
        flush=True,
    )
    memory_of(model, options)


class Opening(NamedTuple):
    """A pair of pipelines, with snapshots and without.

    `share` is the time of snapshots as a share of the whole. `busy_s` are CPU seconds without
    snapshots, and with them.
    """

    every: int
    ratios: list[float]
    share: float
    busy_s: tuple[float, float]


def steps_of(model: str, options: Mapping[str, Any], seconds: float, number: int) -> Opening:
    """Compare steps with and without snapshots, in pairs of blocks. The number of the opening says
    which pipeline opens first."""
    batches, pipes = batches_of(model), dict[str, hp.Pipeline]()
    with ExitStack() as stack:
        for survive in ("off", "auto") if number % 2 else ("auto", "off"):
            pipe = opened(model, pinned([DEVICE] * 2), survive=survive, **options)
            pipes[survive] = stack.enter_context(pipe)
            block_s(pipe, batches, WARM_UP)
        plain, pipe = pipes["off"], pipes["auto"]
        every = fix_interval(pipe)
        steps, ratios, busy, plain_s = SNAPSHOTS * every, list[float](), [0.0, 0.0], list[float]()
        with counted(pipe) as took_s:
            end_s = time.monotonic() + seconds
            for times_s, busy_s in compare((plain, pipe), batches, steps, end_s):
                ratios.append(times_s[1] / times_s[0])
                plain_s.append(times_s[0])
                busy = [one + other for one, other in zip(busy, busy_s, strict=True)]
                print(
                    f"{steps} steps each: {1e3 * times_s[0]:.1f} ms without, "
                    f"{1e3 * times_s[1]:.1f} ms with snapshots, ratio {ratios[-1]:.4f}, of CPU "
                    f"{busy_s[1] / busy_s[0]:.4f}",
                    flush=True,
                )
        share = statistics.median(took_s or [0.0]) / (every * statistics.median(plain_s))
    print(
        f"{model}, pair {number + 1} of pipelines: {len(took_s)} snapshots, ratio "
        f"{statistics.median(ratios):.4f}",
        flush=True,
    )
    return Opening(every, ratios, share, (busy[0], busy[1]))


def memory_of(model: str, options: Mapping[str, Any]) -> None:
    """Print the memory of processes with snapshots, less the memory of others without them."""
    pairs = [
        [
            with_it - without
            for without, with_it in zip(
                memories_of(model, options),
                memories_of(model, {**options, "survive": "auto", "snapshot_every": 2}),
                strict=True,
            )
        ]
        for _ in range(MEMORY_PAIRS)
    ]
    *memories, nbytes, journal = map(statistics.median, zip(*pairs, strict=True))
    names = ("controller, shared", "controller, alone", "workers, shared", "workers, alone")
    text = ", ".join(f"{name} {n / 1e6:.1f}" for name, n in zip(names, memories, strict=True))
    ratios = [sum(pair[: len(names)]) / nbytes for pair in pairs]
    print(
        f"{model}: MB of memory with snapshots less without, medians: {text}; the sum is "
        f"{statistics.median(ratios):.3f} of the predicted {nbytes / 1e6:.1f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {len(pairs)} pairs; bar 1.05), beside "
        f"{journal / 1e6:.2f} of kept mini-batches (measured)",
        flush=True,
    )


def memories_of(model: str, options: Mapping[str, Any]) -> list[float]:
    """Return what `print_memory` prints in a new process."""
    code = "import benchmarks.survivalcost as c; c.print_memory()"
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps((model, options)), check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    return [float(word) for word in done.stdout.split()]


def print_memory() -> None:
    """Print the memory of this process and of its workers after some snapshots, then the sizes of
    snapshots and kept mini-batches. The standard input has a model and options."""
    model, options = pickle.load(sys.stdin.buffer)
    with one_thread(), opened(model, pinned([DEVICE] * 2), **options) as pipe:
        block_s(pipe, batches_of(model), WARM_UP)
        own, *others = of_all(pipe, memory)
        workers = (sum(each) for each in zip(*others, strict=True))
        training = pipe._training
        kept = training.journal_nbytes if isinstance(training, Recorded) else 0
        print(*own, *workers, pipe.snapshot_nbytes, kept)
