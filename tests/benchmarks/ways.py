"""The torch backend's ways to run graphs, on one core: `compile` = eager, inductor and measured.

    PYTHONPATH=tests python -m benchmarks.ways ROUNDS MODEL...

For each model the command prints a line of JSON, a `Ways`. Each start runs in a new process; the
first start has an empty cache. Then one process trains with all three options in turns. With
HETPIPE_CLOCK=process the times of steps are CPU seconds, for a busy machine.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from hetpipe.backends.pytorch import PyTorchBackend

from benchmarks.steprates import Trained
from hetpipe.bench.kernelrates import time_of
from hetpipe.bench.machine import keep_memory
from hetpipe.profile.clock import spread_of
from hetpipe.sdk.backend import Device
from hetpipe.zoo.load import load_workload

OPTIONS = ("eager", "inductor", "measured")


@dataclass(frozen=True)
class Start:
    """Seconds from the load of the stage to the end of the first step, and CPU seconds.

    The CPU seconds include child processes, such as the C++ compiler.
    """

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Ways:
    """The figures of one model, measured on one core.

    `steps_s` has the median step, `spread` the spread of the steps, and `by_eager` the median of
    the ratios to the eager step of the same round. `behind_best` is the median of the ratios of the
    measured step to the eager or compiled step, whichever has the lower median. `graphs` has, for
    each graph that Inductor may compile, the chosen way and the median seconds of both ways.
    """

    model: str
    torch: str
    rounds: int
    steps_s: dict[str, float]
    spread: dict[str, float]
    by_eager: dict[str, float]
    behind_best: float
    graphs: list[dict[str, Any]]
    cold: dict[str, Start]
    warm: dict[str, Start]


def device_of(option: str) -> Device:
    """Open the CPU with a value of `compile`."""
    backend = PyTorchBackend()
    backend.configure({"compile": option}, Path())
    device: Device = backend.open(backend.discover()[0])
    return device


def prepare(model: str) -> Trained:
    """Capture and trace a model as one stage."""
    workload = load_workload(model)
    trained = Trained(workload, next(workload.batches(workload.mini_batch, 0)))
    trained.trace(device_of("eager"))
    return trained


def start(model: str, option: str) -> Start:
    """Load a traced model and train the first step."""
    trained, device = prepare(model), device_of(option)
    begin_s, before_s = time.perf_counter(), _cpu_s()
    trained.load(device)
    trained.step()
    return Start(time.perf_counter() - begin_s, _cpu_s() - before_s)


def measure(model: str, rounds: int) -> Ways:
    """Start the model with an empty cache and with a full one, and then measure its steps."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HETPIPE_CACHE"] = folder
        cold = {option: _start_apart(model, option) for option in ("eager", "measured")}
        warm = {option: _start_apart(model, option) for option in OPTIONS}
        trained = {option: prepare(model) for option in OPTIONS}
        for option, own in trained.items():
            own.load(device_of(option))
            own.step()
            own.step()
        times_s: dict[str, list[float]] = {option: [] for option in OPTIONS}
        for number in range(rounds):
            for option in OPTIONS[number % 3 :] + OPTIONS[: number % 3]:
                times_s[option].append(time_of(trained[option].step, 1))
        choices = Path(folder).glob("compiled/*.json")  # a checksum precedes the content
        graphs = [json.loads(path.read_bytes()[32:]) for path in choices]
    steps_s = {option: statistics.median(own) for option, own in times_s.items()}
    best = min(("eager", "inductor"), key=lambda option: steps_s[option])
    return Ways(
        model=model,
        torch=torch.__version__,
        rounds=rounds,
        steps_s=steps_s,
        spread={option: spread_of(own) for option, own in times_s.items()},
        by_eager={option: _ratio(own, times_s["eager"]) for option, own in times_s.items()},
        behind_best=_ratio(times_s["measured"], times_s[best]),
        graphs=graphs,
        cold=cold,
        warm=warm,
    )


def _ratio(own_s: list[float], other_s: list[float]) -> float:
    return statistics.median(own / other for own, other in zip(own_s, other_s, strict=True))


def _start_apart(model: str, option: str) -> Start:
    """Call `start` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.ways", "start", model, option]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Start(**json.loads(done.stdout.splitlines()[-1]))


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_memory()
    if sys.argv[1] == "start":
        print(json.dumps(asdict(start(*sys.argv[2:]))))
    else:
        for _model in sys.argv[2:]:
            print(json.dumps(asdict(measure(_model, int(sys.argv[1])))), flush=True)
