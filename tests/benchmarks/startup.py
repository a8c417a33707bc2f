"""Time from process start to the first step: `python -m benchmarks.startup [MODEL ...]`.

In each round, every case runs in a new process with empty caches (cold), then in another process
with the caches that are now filled (warm); then plain torch trains its first step. Times are
seconds since the start of the process, as medians over the rounds. In the lines of whole models on
one device (`benchmarks.loaded`), the first time is the time until the model is ready for its first
pass.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.loaded import BEGIN, LOADED, Clock
from hetpipe import process

RESNET, CONVNEXT = "benchmarks.stepmodels:resnet18", "benchmarks.stepmodels:convnext"
TORCH, OPENCL = "pytorch:cpu:0", "opencl:pocl:0"
ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """A model on two devices: with `cuts` and `MICROBATCHES`, or without cuts and planned."""

    model: str
    devices: tuple[str, str]
    cuts: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The name of the case in the table."""
        pair = "torch + " + ("OpenCL" if OPENCL in self.devices else "torch")
        return f"{self.model.rpartition(':')[2]}, {pair}, {'given' if self.cuts else 'planned'}"


CASES = (
    Case(RESNET, (TORCH, TORCH), (9,)),
    Case(RESNET, (TORCH, OPENCL)),
    Case(CONVNEXT, (TORCH, TORCH), (12,)),
    Case(CONVNEXT, (TORCH, OPENCL)),
    Case("gpt", (TORCH, OPENCL)),
    Case("lstm", (TORCH, OPENCL)),
    Case("digits", (TORCH, OPENCL)),
)
MICROBATCHES = 4
ALONE = (("resnet50", OPENCL), ("resnet50", "opencl:intel-cpu:0"))
"""Models that run as a single stage, each with its device."""
MODULE_OF_ALONE = "benchmarks.loaded"


def main(arguments: Sequence[str]) -> None:
    """Print the table; with the arguments of a case, run only this case and print its phases."""
    if arguments[:1] == ["case"]:
        print(json.dumps(_case(*arguments[1:])))
    elif arguments[:1] == ["torch"]:
        print(json.dumps(_torch(arguments[1])))
    else:
        for line in table(arguments):
            print(line, flush=True)


def table(models: Sequence[str], rounds: int = ROUNDS) -> Iterator[str]:
    """Yield the lines of the table for these models, or for all models."""
    for case in CASES:
        if models and not any(model in case.model for model in models):
            continue
        cold, warm, torch = [], [], []
        for _ in range(rounds):
            with TemporaryDirectory() as folder:
                cold.append(_run("case", case, folder))
                warm.append(_run("case", case, folder))
            torch.append(_run("torch", case, None))
        yield f"{case.label}: plain torch {_spread([run['phases']['first step'] for run in torch])}"
        yield from (_line(name, runs) for name, runs in (("cold", cold), ("warm", warm)))
    for model, device in ALONE:
        if not models or any(name in model for name in models):
            yield f"{model}, one stage on {device}"
            yield from _alone(model, device, rounds)


def _alone(model: str, device: str, rounds: int) -> Iterator[str]:
    cold, warm = [], []
    for _ in range(rounds):
        with TemporaryDirectory() as folder:
            cold.append(_process(MODULE_OF_ALONE, [device, model], folder))
            warm.append(_process(MODULE_OF_ALONE, [device, model], folder))
    yield from (_line(name, runs, LOADED) for name, runs in (("cold", cold), ("warm", warm)))


def _line(name: str, runs: list[dict[str, Any]], until: str = "first step") -> str:
    phases = "  ".join(
        f"{phase} {statistics.median(run['phases'].get(phase, 0.0) for run in runs):.1f}"
        for phase in runs[-1]["phases"]
    )
    counts = ", ".join(f"{count} {what}" for what, count in runs[-1]["counts"].items())
    first = _spread([run["phases"][until] for run in runs])
    return f"  {name:5s}{first}   ({phases}{counts and '; '}{counts})"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} s [{min(values):.1f}..{max(values):.1f}]"


def _run(kind: str, case: Case, folder: str | None) -> dict[str, Any]:
    """Run a case in a new process with its caches in `folder`; return its phases and counts."""
    arguments = [kind, case.model]
    if kind == "case":
        arguments += [*case.devices, ",".join(map(str, case.cuts))]
    return _process("benchmarks.startup", arguments, folder)


def _process(module: str, arguments: Sequence[str], folder: str | None) -> dict[str, Any]:
    settings = {BEGIN: repr(time.time())}
    if folder is not None:
        settings |= {"HETPIPE_CACHE": folder, "XDG_CACHE_HOME": folder, "POCL_CACHE_DIR": folder}
    done = subprocess.run(
        process.command(module, *arguments),
        env=process.environment(settings), stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    phases: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return phases


def _case(model: str, first: str, second: str, cuts: str) -> dict[str, Any]:
    clock = Clock()
    import torch  # noqa: F401

    import hetpipe as hp
    from hetpipe.zoo.load import load_workload, optimizer_of

    clock("model")
    workload = load_workload(model)
    example = next(workload.batches(workload.mini_batch, 0))
    options: dict[str, Any] = {}
    if cuts:
        options = {"cuts": [int(cut) for cut in cuts.split(",")], "schedule": "1f1b"}
        options["microbatches"] = MICROBATCHES
    cluster = hp.Cluster.local(devices=[first, second])
    with hp.Pipeline(
        workload.model, workload.loss_fn, example, cluster=cluster,
        optimizer=optimizer_of(workload), progress=clock, **options,
    ) as pipe:  # fmt: skip
        clock("first step")
        pipe.step(*example)
        clock("end")
        return {"phases": clock.phases, "counts": pipe.effort}


def _torch(model: str) -> dict[str, Any]:
    clock = Clock()
    import torch

    from hetpipe.train.eager import Eager
    from hetpipe.zoo.load import load_workload, optimizer_of

    torch.set_num_threads(1)
    workload = load_workload(model)
    x, y = next(workload.batches(workload.mini_batch, 0))
    clock("first step")
    eager = Eager(workload.model, workload.loss_fn, optimizer_of(workload))
    eager.step(x, y, [workload.mini_batch])
    clock("end")
    return {"phases": clock.phases, "counts": {}}


if __name__ == "__main__":
    main(sys.argv[1:])
