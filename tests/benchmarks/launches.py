"""Time of a kernel's launch in a compiled graph, and of an empty kernel in the driver.

    PYTHONPATH=tests python -m benchmarks.launches DEVICE...

The command prints a line for each device. With HETPIPE_CLOCK=process the times are CPU seconds of
this process, for a busy machine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.bench.kernelrates import WAIT_S, time_of
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.host.registry import decompositions_of, open_device

KERNELS, WIDTH, ROUNDS = 200, 16, 60


@dataclass(frozen=True)
class LaunchCost:
    """Medians and minima over the rounds of one run, in seconds per launch.

    `graph_s` is the time of a graph with `KERNELS` softmax kernels of one row, over the number of
    kernels. The time is from the call to the end of the last kernel, so it includes the kernels'
    work. `driver_s` is the time of an empty kernel; None if the device cannot measure it.
    """

    device: str
    graph_s: float
    least_graph_s: float
    driver_s: float | None
    least_driver_s: float | None

    def __str__(self) -> str:
        line = f"{self.device}: {_us(self.graph_s, self.least_graph_s)} a launch in a graph"
        if self.driver_s is None or self.least_driver_s is None:
            return line
        return f"{line}, {_us(self.driver_s, self.least_driver_s)} of an empty kernel"


def measure(device_id: str, kernels: int = KERNELS, rounds: int = ROUNDS) -> LaunchCost:
    """Time the graph and the empty kernel in turns, after one round that warms up."""
    device = open_device(device_id)
    floor = device.launch_floor()
    graph_s, driver_s = [], []
    graph = _resident(device, kernels)
    for _ in range(rounds + 1):
        graph_s.append(time_of(graph, 1) / kernels)
        if floor is not None:
            driver_s.append(time_of(floor[0], 1) / floor[1])
    return LaunchCost(
        device_id,
        statistics.median(graph_s[1:]),
        min(graph_s[1:]),
        statistics.median(driver_s[1:]) if driver_s else None,
        min(driver_s[1:]) if driver_s else None,
    )


def chain(device: Device, kernels: int) -> fx.GraphModule:
    """Return a chain of softmaxes. Each needs the whole previous result, so no two can merge."""

    def whole(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(kernels):
            x = torch.softmax(x, -1)
        return (x,)

    table = dict(decompositions_of(device.info.backend))
    return canonical(make_fx(whole, decomposition_table=table)(torch.zeros(1, WIDTH)))


def _resident(device: Device, kernels: int) -> Callable[[], None]:
    executable = device.compile(chain(device, kernels))
    row, uploaded = device.upload(np.zeros((1, WIDTH), np.float32))
    uploaded.wait(WAIT_S)

    def run() -> None:
        executable.run([row])[1].wait(WAIT_S)

    return run


def _us(median_s: float, least_s: float) -> str:
    return f"{median_s * 1e6:.2f} us ({least_s * 1e6:.2f} at least)"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for _device in sys.argv[1:]:
        print(measure(_device))
