"""Numpy as a streaming device: a pass makes its outputs in parts and reports each part.

`streamed:cpu:0` reports the parts of an output in order; `backwards` reports them in the wrong
order, with gaps. A part is NaN until it is ready, so a test sees a part that leaves too early.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hetpipe.backends.numpy import NumpyBackend, NumpyBuffer, NumpyDevice
from torch import fx

from hetpipe.sdk.backend import DONE, Buffer, Chunk, Event, Executable
from hetpipe.sdk.info import DeviceInfo, Execution

PARTS = 5


class StreamedBackend(NumpyBackend):
    name = "streamed"

    def discover(self) -> list[DeviceInfo]:
        (info,) = super().discover()
        able = replace(info.capabilities, chunks=True)
        return [
            replace(
                info, id=f"streamed:{kind}:{n}", backend="streamed", capabilities=able,
                execution=Execution.ASYNC,
            )
            for kind in ("cpu", "backwards")
            for n in range(3)
        ]  # fmt: skip

    def open(self, info: DeviceInfo) -> StreamedDevice:
        return StreamedDevice(info)


class StreamedDevice(NumpyDevice):
    def compile(self, graph: fx.GraphModule) -> Executable:
        return _Streamed(self, self._compile(graph))

    def download_part(self, buf: Buffer, lo: int, hi: int, dst: Any) -> Event:
        assert isinstance(buf, NumpyBuffer)
        dst[...] = buf.array.reshape(-1)[lo:hi]
        return DONE


class _Streamed(Executable):
    def __init__(self, device: StreamedDevice, program: Any) -> None:
        self._device, self._program = device, program

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        made: Any = self._device._run(self._program, list(inputs), donate)
        given = {id(buffer) for buffer in inputs}
        outputs: list[Buffer] = []
        moves: list[tuple[Any, Any, _Set]] = []
        chunks: list[Chunk] = []
        end = _Set()
        for number, buffer in enumerate(made):
            if id(buffer) in given or buffer.array.dtype.kind != "f":
                outputs.append(buffer)
                continue
            target = NumpyBuffer(self._device, np.full_like(buffer.array, np.nan))
            outputs.append(target)
            size = math.prod(buffer.shape)
            for part in range(PARTS):
                lo, hi = size * part // PARTS, size * (part + 1) // PARTS
                ready = _Set()
                source = buffer.array.reshape(-1)[lo:hi]
                moves.append((target.array.reshape(-1)[lo:hi], source, ready))
                chunks.append((number, lo, hi, ready))
        if "backwards" in self._device.info.id:
            moves.reverse()
            chunks = chunks[::-2]

        def appear() -> None:
            for target, source, ready in moves:
                end.pause()
                target[...] = source
                ready.set()
            end.set()

        threading.Thread(target=appear, daemon=True).start()
        return outputs, end, chunks


class _Set(Event):
    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    def pause(self) -> None:
        self._event.wait(2e-4)

    def done(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        assert self._event.wait(timeout_s)
