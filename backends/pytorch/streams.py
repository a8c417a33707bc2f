"""Accelerators with streams (CUDA, ROCm, XPU): computing and both directions of copy overlap."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import fx

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Buffer, Chunk, Event, Executable
from hetpipe.sdk.events import Signal, finish
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.inputs import Form, check_inputs, input_forms

from .device import Array, CompiledGraph, TorchBuffer, TorchDevice, copy_array, host_array

_POLL_S = (50e-6, 1e-3)  # first and longest pause in a wait with a timeout


class Lane:
    """A stream, and a thread that calls back when work on the stream has ended; no schedule's lane.

    torch has no callbacks on streams, so the thread waits. It starts for the first callback.
    """

    def __init__(self, module: Any, device: torch.device, name: str) -> None:
        self.stream = module.Stream(device=device)
        self.name = name
        self._module = module
        self._device = device
        self._asked: SimpleQueue[tuple[Any, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def mark(self) -> Any:
        """Return torch's event for the end of all work on the stream so far."""
        native = self._module.Event()
        native.record(self.stream)
        return native

    def order(self, after: Sequence[Event]) -> None:
        """Let later work wait for `after`: on the device if possible, else on the host."""
        for event in after:
            if isinstance(event, StreamEvent) and event.lane.kind == self.kind:
                self.stream.wait_event(event.native)
            else:
                event.wait()

    @property
    def kind(self) -> str:
        """torch's name for the type of the device, such as `cuda`."""
        return self._device.type

    def when_ended(self, native: Any, fn: Callable[[], None]) -> None:
        """Call `fn` on the lane's thread once `native` has ended, even if it failed."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name=self.name, daemon=True)
                self._thread.start()
        self._asked.put((native, fn))

    def _watch(self) -> None:
        while (asked := self._asked.get()) is not None:
            native, fn = asked
            # The error is not lost: the event raises it for everyone who waits.
            with contextlib.suppress(RuntimeError):
                native.synchronize()
            fn()

    def close(self) -> None:
        """Let the thread end after its pending callbacks."""
        self._asked.put(None)


class StreamEvent(Event):
    """The end of work on a lane."""

    def __init__(self, device_id: str, lane: Lane) -> None:
        self.lane = lane
        self.native = lane.mark()
        self._device_id = device_id

    def done(self) -> bool:
        return bool(self._ask(self.native.query))

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            self._ask(self.native.synchronize)
            return
        end_s, pause_s = time.monotonic() + timeout_s, _POLL_S[0]
        while not self.done():
            if time.monotonic() > end_s:
                raise BackendError(f"{self._device_id}: not done after {timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise BackendError(f"{self._device_id}: {error}") from error


class StreamDevice(TorchDevice):
    """One stream computes, one copies in, one copies out; host arrays pass through pinned memory.

    `module` is torch's module of the device type: `torch.cuda`, `torch.xpu`.
    """

    def __init__(
        self,
        info: DeviceInfo,
        torch_device: torch.device,
        module: Any,
        operators: Mapping[str, Callable[..., Any]] = {},
    ) -> None:
        super().__init__(info, torch_device, operators)
        self.module = module
        self.compute = Lane(module, torch_device, f"{info.id} compute")
        self._in = Lane(module, torch_device, f"{info.id} in")
        self._out = Lane(module, torch_device, f"{info.id} out")

    def compile(self, graph: fx.GraphModule) -> Executable:
        return _StreamExecutable(self, self.prepare(graph), input_forms(graph))

    def upload(self, src: Array) -> tuple[Buffer, Event]:
        lane, dtype = self._in, src.dtype.name
        staged = self._pinned(src.shape, dtype)
        copy_array(host_array(staged), src)
        with self.module.stream(lane.stream):
            tensor = torch.empty(src.shape, dtype=staged.dtype, device=self.torch_device)
            tensor.copy_(staged, non_blocking=True)
        # Memory belongs to the stream that allocates it, so report its use by another stream.
        tensor.record_stream(self.compute.stream)
        return TorchBuffer(self, tensor, src.shape, dtype), StreamEvent(self.info.id, lane)

    def download(self, buf: Buffer, dst: Array) -> Event:
        lane, tensor = self._out, self.own(buf).tensor
        staged = self._pinned(buf.shape, buf.dtype)
        with self.module.stream(lane.stream):
            staged.copy_(tensor, non_blocking=True)
        tensor.record_stream(lane.stream)
        native, ended = lane.mark(), Signal(f"{self.info.id}: a download")

        def arrive() -> None:
            native.synchronize()  # raises the copy's error
            copy_array(dst, host_array(staged))

        lane.when_ended(native, lambda: finish(ended, arrive))
        return ended

    def _pinned(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True)

    def memory_used_nbytes(self) -> int | None:
        return int(torch.accelerator.memory_allocated(self.torch_device))

    def close(self) -> None:
        for lane in (self.compute, self._in, self._out):
            lane.stream.synchronize()
            lane.close()


class _StreamExecutable(Executable):
    def __init__(self, device: StreamDevice, program: CompiledGraph, forms: Sequence[Form]) -> None:
        self._device = device
        self._program = program
        self._forms = forms

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        device, lane = self._device, self._device.compute
        check_inputs(device.info.id, inputs, self._forms)
        lane.order(after)
        with device.module.stream(lane.stream):
            outputs = self._program([device.own(buffer) for buffer in inputs], donate)
        return outputs, StreamEvent(device.info.id, lane), ()
