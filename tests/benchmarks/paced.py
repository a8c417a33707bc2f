"""Paced devices: another device computes each graph, then the run waits until its modelled end.

Disturbances of this machine do not change the times of a paced device, as long as the other device
computes faster than the pace. `paced-pytorch:slow:pytorch:cpu:0` computes with torch,
`paced-opencl:slow:opencl:pocl:0` with OpenCL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.profile.count import count_calls
from hetpipe.sdk.backend import DONE, Backend, Buffer, Chunk, Device, Event, Executable
from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.info import DeviceInfo
from hetpipe.wire.transport import sleep_until

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pace:
    """A roofline: an operator takes `launch_s`, plus the time of its operations or its bytes.

    The longer one of these two times counts.
    """

    flops: float
    memory_Bps: float
    launch_s: float = 5e-5

    def seconds(self, graph: torch.fx.GraphModule) -> float:
        """Return the modelled time of a graph."""
        return sum(
            self.launch_s + max(each.operations / self.flops, each.nbytes / self.memory_Bps)
            for _, each in count_calls(graph.graph)
        )


PACES = {
    "even": Pace(12e9, 2.5e9),
    "slow": Pace(9e9, 1.7e9),
    "arithmetic": Pace(15e9, 1.3e9),
    "memory": Pace(7.5e9, 3.5e9),
}
"""About a quarter of a usual processor core, with different shares of arithmetic and memory."""


class PacedBackend(Backend):
    """The processors of another backend (`of`), each at several paces."""

    of: str

    def discover(self) -> list[DeviceInfo]:
        return [
            replace(
                info,
                id=f"{self.name}:{pace}:{info.id}",
                backend=self.name,
                capabilities=replace(
                    info.capabilities, queues=1, chunks=False, emulated=True, exports=False
                ),
            )
            for info in get_backend(self.of).discover()
            if info.kind == "cpu"
            for pace in PACES
        ]

    def open(self, info: DeviceInfo) -> Device:
        pace, device = info.id.split(":", 2)[1:]
        inner = get_backend(self.of)
        infos = {each.id: each for each in inner.discover()}
        return PacedDevice(info, inner.open(infos[device]), PACES[pace])

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        return get_backend(self.of).decompositions()

    def worker_environment(self, info: DeviceInfo, cores: int) -> dict[str, str]:
        device = replace(info, id=info.id.split(":", 2)[2], backend=self.of)
        return get_backend(self.of).worker_environment(device, cores)


class PacedTorch(PacedBackend):
    """Paced devices that compute with torch."""

    name, of = "paced-pytorch", "pytorch"


class PacedOpenCL(PacedBackend):
    """Paced devices that compute with OpenCL."""

    name, of = "paced-opencl", "opencl"


class PacedDevice(Device):
    """A device that computes on another device, and takes the modelled time of a pace."""

    def __init__(self, info: DeviceInfo, inner: Device, pace: Pace) -> None:
        self.info, self._inner, self._pace = info, inner, pace

    def supports(self, node: torch.fx.Node) -> str | None:
        return self._inner.supports(node)

    def compile(self, graph: torch.fx.GraphModule) -> Executable:
        return self.compile_all([graph])[0]

    def compile_all(self, graphs: Sequence[torch.fx.GraphModule]) -> list[Executable]:
        times_s = [self._pace.seconds(graph) for graph in graphs]
        pairs = zip(self._inner.compile_all(graphs), times_s, strict=True)
        return [_Paced(executable, seconds) for executable, seconds in pairs]

    def compile_ahead(self, graphs: Sequence[torch.fx.GraphModule]) -> None:
        self._inner.compile_ahead(graphs)

    def upload(self, src: Array) -> tuple[Buffer, Event]:
        return self._inner.upload(src)

    def download(self, buf: Buffer, dst: Array) -> Event:
        return self._inner.download(buf, dst)

    def memory_used_nbytes(self) -> int | None:
        return self._inner.memory_used_nbytes()

    def close(self) -> None:
        self._inner.close()


class _Paced(Executable):
    def __init__(self, inner: Executable, seconds: float) -> None:
        self._inner, self._seconds = inner, seconds

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        for event in after:
            event.wait()
        end_s = time.monotonic() + self._seconds
        outputs, done, _ = self._inner.run(inputs, donate, (), queue)
        done.wait()
        sleep_until(end_s)
        return outputs, DONE, ()
