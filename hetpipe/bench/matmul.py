"""Rate of a device's matrix product, against the device's ceiling and against torch.

`python -m hetpipe.bench.matmul DEVICE` is a child of `hetpipe matmul`, which pins the child to one
core.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from hetpipe.child import Parent
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.host.registry import open_device

Array = npt.NDArray[np.float32]

VERSION = 1
"""Version of the JSON format."""
ROUNDS = 7
ROUND_S = 0.1
"""Approximate time of each contender in a round."""
WAIT_S = 60.0


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
    `of_torch` are medians of the ratios within each round.
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
    """The largest |ours - float64|, over the largest of |A| |B|."""


@dataclass(frozen=True)
class _Contender:
    name: str
    run: Callable[[], object]
    operations: int

    def rate(self, clock: Callable[[], float], seconds: float) -> float:
        """Return the GFLOP/s over about `seconds`."""
        count, start = 0, clock()
        while True:
            self.run()
            count += 1
            elapsed = clock() - start
            if elapsed >= seconds:
                return count * self.operations / elapsed / 1e9


def measure(
    device_id: str,
    n: int = 1024,
    rounds: int = ROUNDS,
    round_s: float = ROUND_S,
    clock: Callable[[], float] = time.perf_counter,
) -> MatmulFigures | None:
    """Time the ceiling, the device and torch in turns, `rounds` times, with torch on one thread.

    On a busy machine `clock` may be `time.process_time`. Return None if the device cannot measure
    its ceiling.
    """
    device = open_device(device_id)
    ceiling = device.fma_ceiling()
    if ceiling is None:
        return None
    a, b = np.random.default_rng(0).standard_normal((2, n, n), dtype=np.float32)
    run, product = _resident_product(device, a, b)
    contenders = [
        _Contender("ceiling", *ceiling),
        _Contender("ours", run, 2 * n**3),
        *_torch_contenders(torch.from_numpy(a), torch.from_numpy(b)),
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for contender in contenders:
            contender.rate(clock, round_s / 4)
        table = [[each.rate(clock, round_s) for each in contenders] for _ in range(rounds)]
    finally:
        torch.set_num_threads(threads)
    rates = {each.name: [row[i] for row in table] for i, each in enumerate(contenders)}
    error = np.abs(product() - a.astype(np.float64) @ b).max() / (np.abs(a) @ np.abs(b)).max()
    return MatmulFigures(
        device_id=device_id,
        n=n,
        rounds=rounds,
        ceiling_gflops=_summary(rates["ceiling"]),
        ours_gflops=_summary(rates["ours"]),
        torch_mm_gflops=_summary(rates["torch_mm"]),
        onednn_gflops=_summary(rates["onednn"]) if "onednn" in rates else None,
        of_ceiling=_ratio(rates["ours"], rates["ceiling"]),
        of_torch=_ratio(rates["ours"], rates["torch_mm"]),
        largest_error=float(error),
    )


def _resident_product(
    device: Device, a: Array, b: Array
) -> tuple[Callable[[], None], Callable[[], Array]]:
    """Return two functions: one runs `aten.mm` on resident tensors, one also fetches a result."""
    executable = device.compile(_mm_graph(a.shape[0]))
    inputs = []
    for host in (a, b):
        buffer, event = device.upload(host)
        event.wait(WAIT_S)
        inputs.append(buffer)

    def run() -> None:
        executable.run(inputs)[1].wait(WAIT_S)

    def product() -> Array:
        (buffer,), event, _ = executable.run(inputs)
        event.wait(WAIT_S)
        host = np.empty_like(a)
        device.download(buffer, host).wait(WAIT_S)
        return host

    return run, product


def _mm_graph(n: int) -> fx.GraphModule:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    for node in (a, b, product):
        node.meta["val"] = torch.empty(n, n, device="meta")
    graph.output((product,))
    return canonical(graph)


def _torch_contenders(a: torch.Tensor, b: torch.Tensor) -> list[_Contender]:
    operations = 2 * a.shape[0] ** 3
    contenders = [_Contender("torch_mm", lambda: torch.mm(a, b), operations)]
    weight = b.t().contiguous()
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is not None:
        run = lambda: linear(a, weight, None, "none", [], "")  # noqa: E731 - one expression
        contenders.append(_Contender("onednn", run, operations))
    return contenders


def _summary(rates: list[float]) -> Rate:
    return Rate(statistics.median(rates), min(rates), max(rates))


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(x / y for x, y in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    _parent = Parent()
    _figures = measure(sys.argv[1])
    _parent.send({"result": _figures and {"version": VERSION, **asdict(_figures)}})
