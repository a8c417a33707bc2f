"""A device whose passes take a set time and do nothing: to look at schedules alone.

`sleeping:10,20` takes 10 ms for a forward and 20 ms for a backward. It runs graphs without
operators, such as `hetpipe.engine.overhead.empty_stage` makes.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from torch import fx

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend, BlockingDevice, Buffer
from hetpipe.sdk.graph import graph_inputs, graph_outputs
from hetpipe.sdk.info import Capabilities, DeviceInfo

Array = Any

SPIN_S = 0.3e-3
"""The end of a pass, which is not slept but waited for: sleeping is that inexact."""


class SleepingBackend(Backend):
    """Devices are what their name says, so any may be opened; one is listed."""

    name = "sleeping"

    def discover(self) -> list[DeviceInfo]:
        info = DeviceInfo(
            id="sleeping:10,20",
            backend="sleeping",
            kind="other",
            name="sleeps",
            vendor="hetpipe",
            driver="time.sleep",
            memory_nbytes=1 << 30,
            memory_domain="host",
            dtypes=("float32", "int64"),
            capabilities=Capabilities(emulated=True),
        )
        return [info, *(replace(info, id=f"sleeping:{times}") for times in ("20,40", "10,15"))]

    def open(self, info: DeviceInfo) -> SleepingDevice:
        return SleepingDevice(info)


class _Held(Buffer):
    def __init__(self, device: SleepingDevice, array: Array) -> None:
        self.device, self.array = device, array
        self.shape, self.dtype = array.shape, array.dtype.name


class SleepingDevice(BlockingDevice):
    """Sleeps to a deadline, so that its own small work does not add up."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        forward, backward = info.id.partition(":")[2].split(",")
        self._seconds = (float(forward) / 1e3, float(backward) / 1e3)

    def supports(self, node: fx.Node) -> str | None:
        return "it only sleeps"

    def _compile(self, graph: fx.GraphModule) -> Any:
        inputs = graph_inputs(graph)
        backward = any(node.name.startswith("grad") for node in inputs)
        places = [inputs.index(node) for node in graph_outputs(graph)]
        return self._seconds[backward], places

    def _run(self, program: Any, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        end_s = time.monotonic() + program[0]
        outputs = [inputs[place] for place in program[1]]
        time.sleep(max(end_s - SPIN_S - time.monotonic(), 0.0))
        while time.monotonic() < end_s:
            pass
        return outputs

    def _to_device(self, src: Array, dst: Buffer | None) -> Buffer:
        if dst is not None:
            raise BackendError(f"{self.info.id} keeps what it has")
        return _Held(self, src.copy())

    def _to_host(self, buf: Buffer, dst: Array) -> None:
        assert isinstance(buf, _Held)
        dst[...] = buf.array
