"""Rates of whole training steps on one core, of a device and of torch in turns.

The device trains the model as a single stage. Torch runs eagerly and, if there is a C++ compiler,
also compiled by inductor.

    PYTHONPATH=tests python -m benchmarks.steprates DEVICE SECONDS ROUNDS MODEL...

The command prints a line of JSON, a list of `StepRate`. With HETPIPE_CLOCK=process the times are
CPU seconds of this process, for a busy machine.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.compiled import compiled
from benchmarks.eagermemory import peak_nbytes
from hetpipe.bench.kernelrates import runs_in, time_of
from hetpipe.bench.machine import keep_memory
from hetpipe.capture.captured import Captured
from hetpipe.capture.precision import Precision
from hetpipe.profile.clock import spread_of
from hetpipe.sdk.backend import Device
from hetpipe.sdk.host.registry import decompositions_of, open_device
from hetpipe.train.eager import Eager
from hetpipe.wire.messages import Keep
from hetpipe.worker.single import SingleStage
from hetpipe.zoo.load import load_workload, optimizer_of
from hetpipe.zoo.workload import Workload


@dataclass(frozen=True)
class StepRate:
    """The figures of one model: medians over rounds of one run, measured on one core.

    A step is a forward, a backward and an update with one micro-batch. `operations` counts the
    operations of products and convolutions, as torch counts them. `share_of_ceiling` is the time
    that these operations would take as multiply-adds in registers, over the time of the step.

    `compiled_time_s` is the step time of torch.compile, and `compile_s` the wall-clock seconds of
    its first step; `not_compiled` is the reason if both are None. `memory_nbytes` is the device's
    own count of its memory after some steps: weights, gradients, optimizer state, saved tensors and
    the arena of intermediates. `torch_memory_nbytes` is the peak of eager torch
    (`benchmarks.eagermemory`).
    """

    model: str
    device: str
    samples: int
    operations: float
    time_s: float
    torch_time_s: float
    share_of_ceiling: float
    ceiling_gflops: float
    spread: float
    loss: float
    torch_loss: float
    compiled_time_s: float | None
    compile_s: float | None
    not_compiled: str
    memory_nbytes: int | None
    torch_memory_nbytes: int


def measure(device_id: str, name: str, round_s: float, rounds: int) -> StepRate:
    """Measure one model of the zoo, or of `package.module:factory`."""
    workload = load_workload(name)
    samples = workload.mini_batch
    x, y = next(workload.batches(samples, 0))
    eager = Eager(copy.deepcopy(workload.model), workload.loss_fn, optimizer_of(workload))
    with _decomposed(), FlopCounterMode(display=False) as counter:
        torch_loss = eager.step(x, y, [samples])
    operations = float(counter.get_total_flops())
    torch_memory = peak_nbytes(eager, x, y, samples)
    device = open_device(device_id)
    trained = Trained(workload, (x, y))
    trained.trace(device)
    trained.load(device)
    ours = trained.step
    loss = ours()
    ceiling = device.fma_ceiling()
    contenders: dict[str, Callable[[], object]] = {
        "ours": ours,
        "torch": lambda: eager.step(x, y, [samples]),
    }
    if ceiling is not None:
        contenders["ceiling"] = ceiling[0]
    rule = optimizer_of(workload)
    with compiled(workload.model, workload.loss_fn, rule, (x, y), samples) as rival:
        if rival.step is not None:
            contenders["compiled"] = rival.step
        times = in_turns(contenders, round_s, rounds)
    time_s = statistics.median(times["ours"])

    def of(name: str) -> float:
        """Return a contender's time: ours, times the median of its ratios to ours by round."""
        pairs = zip(times[name], times["ours"], strict=True)
        return time_s * statistics.median(other / own for other, own in pairs)

    peak = float("inf")
    if ceiling is not None:
        peak = ceiling[1] / statistics.median(times["ceiling"])
    return StepRate(
        model=name,
        device=device_id,
        samples=samples,
        operations=operations,
        time_s=time_s,
        torch_time_s=of("torch"),
        share_of_ceiling=operations / peak / time_s,
        ceiling_gflops=peak / 1e9,
        spread=spread_of(times["ours"]),
        loss=loss,
        torch_loss=torch_loss,
        compiled_time_s=of("compiled") if "compiled" in times else None,
        compile_s=rival.compile_s,
        not_compiled=rival.why_not,
        memory_nbytes=device.memory_used_nbytes(),
        torch_memory_nbytes=torch_memory,
    )


@contextmanager
def _decomposed() -> Iterator[None]:
    """Turn oneDNN off within the context: torch cannot count its recurrent layers' operations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # setting these flags warns about graphics cards
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def in_turns(
    contenders: Mapping[str, Callable[[], object]], round_s: float, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds per run of each contender in each round."""
    counts = {name: runs_in(run, round_s) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(time_of(run, counts[name]))
    return times


class Trained:
    """Training of a workload on one device, as a single stage."""

    def __init__(
        self,
        workload: Workload,
        batch: tuple[Any, Any],
        precision: Precision = Precision(),  # noqa: B008 - frozen
    ) -> None:
        """Capture the model for micro-batches of the batch's size."""
        self.captured = Captured(workload.model, workload.loss_fn, batch, precision)
        self._rule = optimizer_of(workload)
        self._feed = self.captured.leaves(*batch)
        self._samples = len(self._feed["y"])

    def trace(self, device: Device) -> None:
        """Trace the graphs of the passes and the update."""
        table = decompositions_of(device.info.backend)
        (self._graphs,) = self.captured.stage_graphs(
            [], [table], [self._samples], self._rule, extras=()
        )

    def load(self, device: Device) -> None:
        """Compile the graphs and upload the weights."""
        values = {**self.captured.parameters, **self.captured.buffers}
        keep = Keep(updates=(0,), late_gradients=True)
        self._single = SingleStage(device, self._graphs, values, keep)

    def step(self) -> float:
        """Train a step and return its loss."""
        single = self._single
        single.forward(self._samples, self._feed)
        single.backward(self._samples, self._feed)
        single.stage.update(self._rule.rates_at(1), single.grad_scale)
        return single.loss


if __name__ == "__main__":
    _device, _seconds, _rounds, *_models = sys.argv[1:]
    torch.set_num_threads(1)
    keep_memory()
    _rates = [measure(_device, name, float(_seconds), int(_rounds)) for name in _models]
    print(json.dumps([asdict(rate) for rate in _rates]))
