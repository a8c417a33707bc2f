"""Self-test of a device: copies, a small training, and the rates of copies and products."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.check.difference import Array, case_tolerance, difference, eps_of
from hetpipe.check.reference import float64_results
from hetpipe.errors import HetpipeError
from hetpipe.sdk.backend import Buffer, Device, Executable
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.host.registry import decompositions_of
from hetpipe.sdk.host.validation import upload

_EVENT_S = 10.0  # longest wait for one event
BURSTS = 3
"""How often the self-test measures each rate; it reports the best burst."""
_BURST_S = 0.07  # time for the copies, and for each matrix size
_PAUSE_S = 0.3  # between two bursts, so that they do not all meet one disturbance
_SIZES = (64, 256, 1024)  # matrix sizes, tried in order until a product takes too long
_CALL_S = 1.0  # longest expected time of a product
_COPY_NBYTES = 4 << 20
TERMS = 16
"""The terms of the longest sums in the training step."""


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test; `message` describes the failure, or the checks that passed."""

    ok: bool
    message: str
    seconds: float
    gflops_matmul: float  # float32 products, one after the other; 0 if the test failed
    copy_Bps: float  # host to device and back; counts the bytes of both directions
    bursts: int  # how often both rates were measured; they are the best burst's


def selftest(device: Device) -> SelfTest:
    """Compare a device with torch in float64 and measure two rates, in a few seconds.

    Return failures in the result instead of raising `HetpipeError`.
    """
    start_s = time.perf_counter()
    gflops, copy_Bps = 0.0, 0.0
    try:
        problem = _round_trip(device) or _training(device)
        if problem is None:
            copy_Bps, gflops = _rates(device)
    except HetpipeError as error:
        problem = str(error)
    seconds = time.perf_counter() - start_s
    message = problem or "copies come back equal, a training step agrees with torch in float64"
    return SelfTest(problem is None, message, seconds, gflops, copy_Bps, BURSTS)


def _put(device: Device, array: Array) -> Buffer:
    buffer, event = upload(device, array)
    event.wait(_EVENT_S)
    return buffer


def _get(device: Device, buffer: Buffer) -> Array:
    array = np.empty(buffer.shape, buffer.dtype)
    device.download(buffer, array).wait(_EVENT_S)
    return array


def _round_trip(device: Device) -> str | None:
    generator = np.random.default_rng(0)
    for dtype in ("float32", "int64", "int32", "bool"):
        if dtype not in device.info.dtypes:
            continue
        for shape in ((), (1,), (3, 5), (1023,)):
            sent = np.asarray(generator.integers(0, 2, shape), dtype)
            if not np.array_equal(_get(device, _put(device, sent)), sent):
                return f"a {dtype} array of shape {shape} came back changed"
    return None


def _compile(device: Device, fn: Callable[..., Any], inputs: list[Array]) -> Executable:
    return device.compile(_graph(fn, inputs, decompositions_of(device.info.backend)))


def _graph(
    fn: Callable[..., Any], inputs: list[Array], table: Mapping[Any, Callable[..., Any]]
) -> fx.GraphModule:
    tensors = [torch.from_numpy(array) for array in inputs]
    graph: fx.GraphModule = make_fx(fn, decomposition_table=dict(table))(*tensors)
    graph.graph.eliminate_dead_code()
    return canonical(graph)


def _step(x: Any, y: Any, w1: Any, b1: Any, w2: Any, lr: Any) -> tuple[Any, ...]:
    """Train a perceptron for one step on the mean squared error: return loss and parameters."""
    hidden = (x @ w1 + b1).relu()
    error = hidden @ w2 - y
    slope = error * (2.0 / error.numel())
    upward = torch.where(hidden <= 0, 0.0, slope @ w2.t())
    new = (w1 - lr * (x.t() @ upward), b1 - lr * upward.sum(0), w2 - lr * (hidden.t() @ slope))
    return ((error * error).sum([0, 1]) * (1 / error.numel()), *new)


def _step_inputs() -> list[Array]:
    generator = np.random.default_rng(1)
    shapes = ((8, 12), (8, 3), (12, 16), (16,), (16, 3))
    inputs = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [*inputs, np.asarray(0.1, np.float32)]


def _training(device: Device) -> str | None:
    inputs = _step_inputs()
    executable = _compile(device, _step, inputs)
    exact = list(inputs)
    buffers = [_put(device, array) for array in inputs]
    for step in range(3):
        outputs, event, _ = executable.run(buffers, frozenset({2, 3, 4}))
        event.wait(_EVENT_S)
        expected = float64_results(_step, [torch.from_numpy(array) for array in exact])
        exact[2:5] = expected[1:]
        buffers[2:5] = outputs[1:]
        for name, buffer, wide in zip(("loss", "w1", "b1", "w2"), outputs, expected, strict=True):
            allowed = case_tolerance(wide, eps_of("float32"), TERMS)
            found = difference(_get(device, buffer), wide, allowed)
            if found.is_wrong:
                return (
                    f"training step {step}: {name} is off by {found.error:.3g}, allowed "
                    f"{allowed:.3g}"
                )
    return None


def _rates(device: Device) -> tuple[float, float]:
    """Return the bytes copied per second, and GFLOP/s of products, each of the best burst."""
    copies, products = _copies(device), _products(device)
    work = [copies, *products]
    best_s = [float("inf")] * len(work)
    for burst in range(BURSTS):
        if burst:
            time.sleep(_PAUSE_S)
        best_s = [min(best, _fastest_s(run)) for best, (_, run) in zip(best_s, work, strict=True)]
    rates = [amount / seconds for (amount, _), seconds in zip(work, best_s, strict=True)]
    return rates[0], max(rates[1:]) / 1e9


def _fastest_s(call: Callable[[], None]) -> float:
    """Return the seconds of the fastest call within `_BURST_S`."""
    best_s, end_s = float("inf"), time.perf_counter() + _BURST_S
    while True:
        start_s = time.perf_counter()
        call()
        now_s = time.perf_counter()
        best_s = min(best_s, now_s - start_s)
        if now_s >= end_s:
            return best_s


Work = tuple[int, Callable[[], None]]
"""The bytes or floating-point operations of a call, and the call."""


def _copies(device: Device) -> Work:
    """Return a copy to the device and back, with its bytes in both directions."""
    nbytes = 4096 if device.info.capabilities.reference else _COPY_NBYTES
    array = np.zeros(nbytes // 4, np.float32)
    buffer, back = _put(device, array), np.empty_like(array)

    def both() -> None:
        device.upload(array)[1].wait(_EVENT_S)
        device.download(buffer, back).wait(_EVENT_S)

    both()
    return 2 * nbytes, both


def _products(device: Device) -> list[Work]:
    """Return float32 products with their operations, without sizes that take too long."""
    products: list[Work] = []
    for size in _SIZES if not device.info.capabilities.reference else (16,):
        if products and 64 * _fastest_s(products[-1][1]) > _CALL_S:  # 4 times larger takes 64 times
            break
        matrices = [np.ones((size, size), np.float32)] * 2
        executable = _compile(device, lambda a, b: (a @ b,), matrices)
        buffers = [_put(device, matrix) for matrix in matrices]

        def once(run: Executable = executable, inputs: list[Buffer] = buffers) -> None:
            run.run(inputs)[1].wait(_EVENT_S)

        once()
        products.append((2 * size**3, once))
    return products
