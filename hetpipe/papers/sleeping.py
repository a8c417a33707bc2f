"""A device whose passes take a set time and compute nothing, for measurements of schedules alone.

`sleeping:10,20` takes 10 ms for a forward and 20 ms for a backward. Two passes at the same time run
at half speed each. `sleeping:10,20,16` streams its outputs in 16 chunks. The devices run graphs
without operators, such as the graphs of `hetpipe.papers.overhead.empty_stage`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import DONE, Backend, Buffer, Chunk, Event, Executable
from hetpipe.sdk.blocking import BlockingDevice
from hetpipe.sdk.graph import graph_inputs, graph_outputs
from hetpipe.sdk.info import Capabilities, DeviceInfo, Execution

Array = Any

SPIN_S = 0.3e-3
"""Seconds at the end of a pass in which a waiting thread spins, because sleeping is not exact."""


class SleepingBackend(Backend):
    """The backend of sleeping devices; a device's id sets its times."""

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
            capabilities=Capabilities(queues=2, emulated=True),
        )
        streams = replace(
            info,
            id="sleeping:10,20,16",
            execution=Execution.ASYNC,
            capabilities=replace(info.capabilities, chunks=True),
        )
        others = (replace(info, id=f"sleeping:{times}") for times in ("20,40", "10,15"))
        return [info, *others, streams]

    def open(self, info: DeviceInfo) -> SleepingDevice:
        return StreamingDevice(info) if info.capabilities.chunks else SleepingDevice(info)


class _Held(Buffer):
    def __init__(self, device: SleepingDevice, array: Array) -> None:
        self.device, self.array = device, array
        self.shape, self.dtype = array.shape, array.dtype.name


class SharedSpeed:
    """A device's speed, which the passes that run at the same time share evenly."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._left_s: dict[object, float] = {}  # seconds left to each pass, at full speed
        self._since_s = 0.0  # the moment for which `_left_s` is valid
        self._changed = threading.Condition()

    def begin(self, seconds: float) -> object:
        """Begin a pass that takes `seconds` at full speed; return the pass's key."""
        mine = object()
        with self._changed:
            self._elapse()
            self._left_s[mine] = seconds
            self._changed.notify_all()
        return mine

    def reached(self, mine: object, left_s: float) -> bool:
        """Return whether a pass has at most `left_s` left, in seconds at full speed."""
        with self._changed:
            self._elapse()
            return self._left_s.get(mine, 0.0) <= left_s

    def until(self, mine: object, left_s: float = 0.0, timeout_s: float = math.inf) -> None:
        """Wait until a pass has at most `left_s` left. Raises `BackendError` after `timeout_s`."""
        begin_s = self._now_s()
        spin_s = 0.0 if left_s else SPIN_S
        while not self.reached(mine, left_s):
            with self._changed:
                rest_s = (self._left_s.get(mine, 0.0) - left_s) * len(self._left_s)
                rest_s += self._since_s - spin_s - self._now_s()
                if rest_s > 0:
                    self._changed.wait(rest_s)
            if self._now_s() - begin_s > timeout_s:
                raise BackendError(f"a pass still sleeps after {timeout_s} s")

    def _elapse(self) -> None:
        """Bring times up to date; a pass slows other passes only until its exact end."""
        now_s = self._now_s()
        while self._left_s:
            first = min(self._left_s, key=self._left_s.__getitem__)
            end_s = self._since_s + self._left_s[first] * len(self._left_s)
            share_s = (min(end_s, now_s) - self._since_s) / len(self._left_s)
            self._left_s = {each: left_s - share_s for each, left_s in self._left_s.items()}
            self._since_s = min(end_s, now_s)
            if end_s > now_s:
                return
            del self._left_s[first]
            self._changed.notify_all()
        self._since_s = now_s


class SleepingDevice(BlockingDevice):
    """A device that sleeps until the moment when a pass ends, so bookkeeping adds no time."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self._speed = SharedSpeed()
        forward, backward = info.id.split(":")[1].split(",")[:2]
        self._seconds = (float(forward) / 1e3, float(backward) / 1e3)

    def supports(self, node: fx.Node) -> str | None:
        return "it only sleeps"

    def _compile(self, graph: fx.GraphModule) -> Any:
        inputs = graph_inputs(graph)
        backward = any(node.name.startswith("grad") for node in inputs)
        places = [inputs.index(node) for node in graph_outputs(graph)]
        return self._seconds[backward], places

    def _run(self, program: Any, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        self._speed.until(self._speed.begin(program[0]))
        return [inputs[place] for place in program[1]]

    def _to_device(self, src: Array) -> Buffer:
        return _Held(self, src.copy())

    def _to_host(self, buf: Buffer, dst: Array) -> None:
        assert isinstance(buf, _Held)
        dst[...] = buf.array


class StreamingDevice(SleepingDevice):
    """A device with asynchronous passes, which reports its outputs in chunks at even intervals."""

    def __init__(self, info: DeviceInfo) -> None:
        super().__init__(info)
        self._count = int(info.id.split(":")[1].split(",")[2])

    def compile(self, graph: fx.GraphModule) -> Executable:
        return _Streaming(self._speed, self._count, *self._compile(graph))

    def download_part(self, buf: Buffer, lo: int, hi: int, dst: Array) -> Event:
        assert isinstance(buf, _Held)
        dst[...] = buf.array.reshape(-1)[lo:hi]
        return DONE


class _Streaming(Executable):
    def __init__(self, speed: SharedSpeed, count: int, seconds: float, places: list[int]) -> None:
        self._speed, self._count = speed, count
        self._seconds, self._places = seconds, places

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        for event in after:
            event.wait()
        outputs = [inputs[place] for place in self._places]
        count, mine = self._count, self._speed.begin(self._seconds)
        lefts = [self._seconds * (count - 1 - part) / count for part in range(count)]
        ready = [_Reached(self._speed, mine, left_s) for left_s in lefts]
        chunks = [
            (number, size * part // count, size * (part + 1) // count, ready[part])
            for number, size in enumerate(math.prod(output.shape) for output in outputs)
            for part in range(count)
        ]
        return outputs, ready[-1], chunks


class _Reached(Event):
    """The moment when a pass has at most `left_s` left."""

    def __init__(self, speed: SharedSpeed, mine: object, left_s: float) -> None:
        self._speed, self._mine, self._left_s = speed, mine, left_s

    def done(self) -> bool:
        return self._speed.reached(self._mine, self._left_s)

    def wait(self, timeout_s: float | None = None) -> None:
        self._speed.until(self._mine, self._left_s, math.inf if timeout_s is None else timeout_s)
