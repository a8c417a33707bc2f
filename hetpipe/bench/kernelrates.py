"""Measures the rates of a device's kernels, and of torch and two ceilings on the same core.

    python -m hetpipe.bench.kernelrates DEVICE SETS SECONDS ROUNDS

This child sends its parent a list of `KernelRate`. In every round the device's kernel, torch and
the ceilings (multiply-adds in registers, and a copy) take turns. With HETPIPE_CLOCK=process, the
times are CPU seconds of this process, for a busy machine.
"""

from __future__ import annotations

import mmap
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.bench.kernelcases import SETS, Case
from hetpipe.bench.machine import keep_memory
from hetpipe.check.reference import float64_results
from hetpipe.child import Parent
from hetpipe.environment import clock
from hetpipe.profile.clock import spread_of
from hetpipe.sdk.backend import Buffer, Device
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.host.registry import decompositions_of, open_device
from hetpipe.train.training import one_thread

WAIT_S = 120.0


@dataclass(frozen=True)
class KernelRate:
    """One kernel at one size: medians over the rounds of one run, measured on one core.

    `share_of_ceiling` is the shortest possible time over the measured time. The shortest possible
    time is the longer of two times: for as many multiply-adds in registers, and for a copy of as
    many bytes. `torch_way` names torch's fastest way on the same core (convolutions with channels
    last), and `torch_time_s` is its time. `spread` is the spread of `time_s` over the rounds.
    `error` is the largest difference from torch in float64, over the largest element.
    """

    kernel: str
    shape: str
    device: str
    time_s: float
    gflops: float
    gbytes_per_s: float
    share_of_ceiling: float
    torch_time_s: float
    torch_way: str
    group: str
    spread: float
    error: float
    ceiling_gflops: float
    copy_gbytes_per_s: float


CLOCK = clock()


def measure(device_id: str, cases: Sequence[Case], round_s: float, rounds: int) -> list[KernelRate]:
    """Return the rates of all cases, with torch on one thread.

    This process keeps freed memory from now on.
    """
    keep_memory()
    device = open_device(device_id)
    with one_thread():
        return [_measure(device, case, round_s, rounds) for case in cases]


def _measure(device: Device, case: Case, round_s: float, rounds: int) -> KernelRate:
    torch.manual_seed(0)
    tensors = [torch.randn(shape) * 0.1 for shape in case.shapes]
    ours, fetch = resident(device, case, tensors)
    error = error_of(case, tensors, fetch())
    names, theirs = zip(*torch_ways(case, tensors).items(), strict=True)
    source, room = (_in_large_pages(int(case.nbytes // 8)) for _ in range(2))
    ceiling = device.fma_ceiling()
    contenders: list[Callable[[], object]] = [ours, lambda: room.copy_(source), *theirs]
    if ceiling is not None:
        contenders.append(ceiling[0])
    counts = [runs_in(run, round_s) for run in contenders]
    table = [
        [time_of(run, count) for run, count in zip(contenders, counts, strict=True)]
        for _ in range(rounds)
    ]
    ours_s, copy_s, *others_s = (list(column) for column in zip(*table, strict=True))
    peak = [ceiling[1] / each for each in others_s.pop()] if ceiling is not None else []
    ways = {
        name: statistics.median(t / o for t, o in zip(way_s, ours_s, strict=True))
        for name, way_s in zip(names, others_s, strict=True)
    }
    best = min(ways, key=lambda name: ways[name])
    bound_s = [
        max(copy, case.operations / peak[i] if peak else 0.0) for i, copy in enumerate(copy_s)
    ]
    time_s = statistics.median(ours_s)
    return KernelRate(
        kernel=case.kernel,
        shape=case.shape,
        device=device.info.id,
        time_s=time_s,
        gflops=case.operations / time_s / 1e9,
        gbytes_per_s=case.nbytes / time_s / 1e9,
        share_of_ceiling=statistics.median(b / o for b, o in zip(bound_s, ours_s, strict=True)),
        torch_time_s=time_s * ways[best],
        torch_way=best,
        group=case.group,
        spread=spread_of(ours_s),
        error=error,
        ceiling_gflops=statistics.median(peak) / 1e9 if peak else 0.0,
        copy_gbytes_per_s=case.nbytes / statistics.median(copy_s) / 1e9,
    )


def _in_large_pages(count: int) -> torch.Tensor:
    """Return `count` zeros in memory with large pages, if Linux grants them.

    A copy in large pages is 1.5 times as fast. Without this function, chance would decide whether
    torch's tensors reuse large pages that a device has freed.
    """
    memory = mmap.mmap(-1, count * 4)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.float32)).zero_()


def resident(
    device: Device, case: Case, tensors: Sequence[torch.Tensor]
) -> tuple[Callable[[], object], Callable[[], Any]]:
    """Return functions that run the case on the device; the second returns its first result."""
    table = decompositions_of(device.info.backend)

    def whole(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = case.function(*inputs)
        return result if isinstance(result, tuple) else (result,)

    graph = make_fx(whole, decomposition_table=dict(table))(*tensors)
    graph.graph.eliminate_dead_code()
    executable = device.compile(canonical(graph))
    buffers = []
    for tensor in tensors:
        buffer, event = device.upload(tensor.numpy())
        event.wait(WAIT_S)
        buffers.append(buffer)

    def run() -> list[Buffer]:
        results, event, _ = executable.run(buffers, donate=frozenset(case.replaces))
        event.wait()  # a time limit would need a thread, whose start takes as long as a product
        for place, result in zip(case.replaces, results, strict=False):
            buffers[place] = result
        return list(results)

    def fetch() -> Any:
        results = run()
        host = np.empty(results[0].shape, results[0].dtype)
        device.download(results[0], host).wait(WAIT_S)
        return host

    return run, fetch


def torch_ways(case: Case, tensors: Sequence[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Return torch's calls by name: the eager operator, and other ways to the same result."""
    function = case.theirs or case.function
    if case.channels_last:
        tensors = [t.contiguous(memory_format=torch.channels_last) for t in tensors]
    ways = {name: prepare(*tensors) for name, prepare in case.ways.items()}
    return {"eager": lambda: function(*tensors), **ways}


def error_of(case: Case, tensors: Sequence[torch.Tensor], actual: Any) -> float:
    """Return the largest error of the first result, over the result's largest element."""
    wide = float64_results(case.function, tensors)[0]
    return float(np.abs(actual - wide).max() / np.abs(wide).max())


def runs_in(run: Callable[[], object], round_s: float) -> int:
    """Return how many runs take about `round_s`; run once untimed, and once timed."""
    run()
    return max(1, round(round_s / time_of(run, 1)))


def time_of(run: Callable[[], object], count: int) -> float:
    begin_s = CLOCK()
    for _ in range(count):
        run()
    return (CLOCK() - begin_s) / count


if __name__ == "__main__":
    _parent = Parent()
    _device, _names, _seconds, _rounds = sys.argv[1:]
    _cases = [case for name in _names.split(",") for case in SETS[name]()]
    _rates = measure(_device, _cases, float(_seconds), int(_rounds))
    _parent.send({"result": [asdict(rate) for rate in _rates]})
