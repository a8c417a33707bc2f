"""Measures the rates of matrix products, on a device and in torch, and of the device's ceiling.

`python -m hetpipe.bench.matmul DEVICE` is a child of `hetpipe matmul`, which pins the child to one
core.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict, dataclass

import torch

from hetpipe.bench.kernelcases import product
from hetpipe.bench.kernelrates import error_of, resident, runs_in, time_of, torch_ways
from hetpipe.child import Parent
from hetpipe.sdk.host.registry import open_device
from hetpipe.train.training import one_thread

VERSION = 2  # of the JSON format
N = 1024
ROUNDS = 7
ROUND_S = 0.1  # approximate seconds of each contender in a round


@dataclass(frozen=True)
class Rate:
    """Median, lowest and highest GFLOP/s over the rounds of one run."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class MatmulFigures:
    """Rates of float32 products of n x n matrices, measured in turns, including packing.

    `ceiling_gflops` is the rate of multiply-adds in registers on the device. `torch_mm_gflops` is
    the rate of `torch.mm`. `onednn_gflops` is the rate of torch's oneDNN linear
    (`mkldnn::_linear_pointwise`, plain weights), or None if torch lacks it. `of_ceiling` and
    `of_torch` are medians of the ratios within each round. `largest_error` is the largest
    difference from torch in float64, over the largest element.
    """

    device_id: str
    n: int
    rounds: int
    ceiling_gflops: Rate
    ours_gflops: Rate
    torch_mm_gflops: Rate
    onednn_gflops: Rate | None
    of_ceiling: float
    of_torch: float
    largest_error: float


def measure(device_id: str) -> MatmulFigures | None:
    """Time the ceiling, the device and torch in turns, with torch on one thread.

    Return None if the device cannot measure its ceiling.
    """
    device = open_device(device_id)
    ceiling = device.fma_ceiling()
    if ceiling is None:
        return None
    case = product("mm", N, N, N, torch.mm)
    torch.manual_seed(0)
    tensors = [torch.randn(shape) for shape in case.shapes]
    ours, fetch = resident(device, case, tensors)
    contenders = {"ceiling": ceiling[0], "ours": ours, **torch_ways(case, tensors)}
    operations = dict.fromkeys(contenders, case.operations) | {"ceiling": ceiling[1]}
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    with one_thread():
        counts = {name: runs_in(run, ROUND_S) for name, run in contenders.items()}
        for _ in range(ROUNDS):
            for name, run in contenders.items():
                rates[name].append(operations[name] / time_of(run, counts[name]) / 1e9)
    return MatmulFigures(
        device_id=device_id,
        n=N,
        rounds=ROUNDS,
        ceiling_gflops=_summary(rates["ceiling"]),
        ours_gflops=_summary(rates["ours"]),
        torch_mm_gflops=_summary(rates["eager"]),
        onednn_gflops=_summary(rates["oneDNN"]) if "oneDNN" in rates else None,
        of_ceiling=_ratio(rates["ours"], rates["ceiling"]),
        of_torch=_ratio(rates["ours"], rates["eager"]),
        largest_error=error_of(case, tensors, fetch()),
    )


def _summary(rates: list[float]) -> Rate:
    return Rate(statistics.median(rates), min(rates), max(rates))


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    _parent = Parent()
    _figures = measure(sys.argv[1])
    _parent.send({"result": _figures and {"version": VERSION, **asdict(_figures)}})
