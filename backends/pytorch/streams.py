"""Accelerators with streams (CUDA, ROCm, XPU): computing and both directions of copy overlap."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import signature
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import fx

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Buffer, Chunk, Event, Executable
from hetpipe.sdk.events import Signal, finish
from hetpipe.sdk.indices import Bound
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.inputs import Form, check_inputs, input_forms

from .device import Array, CompiledGraph, TorchBuffer, TorchDevice, copy_array, host_array
from .guards import check_extremes, guarded
from .options import Options
from .pinning import PinnedMemory

_POLL_S = (50e-6, 1e-3)  # first and longest pause in a wait with a timeout


def _blocking(module: Any) -> dict[str, bool]:
    """Return the arguments for events whose waits sleep: a CPU stage needs the spinning core."""
    return {"blocking": True} if "blocking" in signature(module.Event.__new__).parameters else {}


RESERVE, RESERVE_NBYTES = 0.05, 512 << 20
"""The part of a card's memory, and the bytes, that plans leave free. cuBLAS takes up to 32 MiB for
each stream, the driver loads kernels at their first launch, and torch's allocator, which takes
memory in blocks of 2 to 20 MiB, leaves gaps. The sum is an estimate: it was measured on no card."""


class Lane:
    """A stream, and a thread that calls back when work on the stream has ended; no schedule's lane.

    torch has no callbacks on streams, so the thread waits. It starts for the first callback.
    """

    def __init__(self, module: Any, device: torch.device, name: str) -> None:
        self.stream = module.Stream(device=device)
        self.name = name
        self._event = partial(module.Event, **_blocking(module))
        self._device = device
        self._asked: SimpleQueue[tuple[Any, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def mark(self) -> Any:
        """Return torch's event for the end of all work on the stream so far."""
        native = self._event()
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
    """The end of work on a lane; `check` raises if the work went wrong, and is called after it."""

    def __init__(
        self, device_id: str, lane: Lane, check: Callable[[], None] = lambda: None
    ) -> None:
        self.lane = lane
        self.native = lane.mark()
        self._device_id = device_id
        self._check = check

    def done(self) -> bool:
        ended = bool(self._ask(self.native.query))
        if ended:
            self._check()
        return ended

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            self._ask(self.native.synchronize)
            self._check()
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

    `module` is torch's module of the device type: `torch.cuda`, `torch.xpu`. Products of float32
    round their operands to ten bits only if `tf32` is true.
    """

    def __init__(
        self,
        info: DeviceInfo,
        torch_device: torch.device,
        module: Any,
        operators: Mapping[str, Callable[..., Any]] = {},
        options: Options = Options(),  # noqa: B008 - it is frozen
    ) -> None:
        super().__init__(info, torch_device, operators, options)
        self.module = module
        self.precision = "tf32" if options.tf32 else "ieee"
        self._pins = PinnedMemory(info, module)
        self.compute = Lane(module, torch_device, f"{info.id} compute")
        self._in = Lane(module, torch_device, f"{info.id} in")
        self._out = Lane(module, torch_device, f"{info.id} out")

    def compile(self, graph: fx.GraphModule) -> Executable:
        safe, bounds = guarded(graph)
        return _StreamExecutable(self, self.prepare(safe), input_forms(graph), bounds)

    def upload(self, src: Array) -> tuple[Buffer, Event]:
        src = np.asarray(src)  # a scalar of numpy has no memory
        lane, dtype = self._in, src.dtype.name
        with self.blamed(f"uploading {src.nbytes} bytes"), self.module.stream(lane.stream):
            # The device's memory first: if it does not suffice, the host needs none.
            tensor = torch.empty(src.shape, dtype=getattr(torch, dtype), device=self.torch_device)
            staged = self._pins.tensor(src)
            if staged is None:
                staged = self.pinned(src.shape, dtype)
                copy_array(host_array(staged), src)
            tensor.copy_(staged, non_blocking=True)
            self._shared(tensor, self.compute)
            return TorchBuffer(self, tensor, src.shape, dtype), StreamEvent(self.info.id, lane)

    def download(self, buf: Buffer, dst: Array) -> Event:
        lane, tensor = self._out, self.own(buf).tensor
        direct = self._pins.tensor(dst)
        with self.blamed(f"downloading {buf.nbytes} bytes"), self.module.stream(lane.stream):
            staged = self.pinned(buf.shape, buf.dtype) if direct is None else direct
            # Memory of the host has int16 for bfloat16, which numpy lacks.
            staged.copy_(tensor.view(staged.dtype), non_blocking=True)
            self._shared(tensor, lane)
            if direct is not None:
                return StreamEvent(self.info.id, lane)
            native, ended = lane.mark(), Signal(f"{self.info.id}: a download")

        def arrive() -> None:
            native.synchronize()  # raises the copy's error
            copy_array(dst, host_array(staged))

        lane.when_ended(native, lambda: finish(ended, arrive))
        return ended

    def pin(self, memory: Array) -> Callable[[], None]:
        """Copy between this memory and the card without a copy within the host."""
        end = self._pins.add(memory)

        def unpin() -> None:
            for lane in (self._in, self._out):
                lane.stream.synchronize()
            end()

        return unpin

    @contextlib.contextmanager
    def precise(self) -> Iterator[None]:
        """Let torch's libraries compute in this device's precision in the block.

        torch would round the operands of convolutions to ten bits by default.
        """
        before = {where: torch._C._get_fp32_precision_getter(*where) for where in _PRODUCTS}
        try:
            for where in _PRODUCTS:
                torch._C._set_fp32_precision_setter(*where, self.precision)
            yield
        finally:
            for where, precision in before.items():
                torch._C._set_fp32_precision_setter(*where, precision)

    def pinned(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """Return memory of the host that the current device can read."""
        return torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True)

    def _shared(self, tensor: torch.Tensor, lane: Lane) -> None:
        """Keep a freed tensor's memory until the lane, another than its own, no longer needs it."""
        tensor.record_stream(lane.stream)

    def memory_used_nbytes(self) -> int | None:
        if not hasattr(self.module, "memory_reserved"):  # a module from outside torch
            return None
        return int(self.module.memory_reserved(self.torch_device))

    def memory_available_nbytes(self) -> int | None:
        if not hasattr(self.module, "mem_get_info"):
            return None
        try:
            free_nbytes, total_nbytes = self.module.mem_get_info(self.torch_device)
        except RuntimeError:  # some of Intel's cards do not tell it
            return None
        held_nbytes = int(self.module.memory_reserved(self.torch_device))
        reserve_nbytes = int(RESERVE * total_nbytes) + RESERVE_NBYTES
        return max(0, int(free_nbytes) + held_nbytes - reserve_nbytes)

    def trim(self) -> None:
        """Return unused memory of the card, and unused pinned memory of the host."""
        if hasattr(self.module, "empty_cache"):
            self.module.empty_cache()
        if torch.accelerator.is_available():
            torch.accelerator.empty_host_cache()

    def close(self) -> None:
        for lane in (self.compute, self._in, self._out):
            lane.stream.synchronize()
            lane.close()


_PRODUCTS = [
    (library, operation)
    for library in ("cuda", "mkldnn")
    for operation in ("matmul", "conv", "rnn")
]
"""torch's settings for the precision of float32 products; `mkldnn` is for cards of Intel."""


class _StreamExecutable(Executable):
    """A compiled graph; with `bounds`, its last output is for the host alone, see `guarded`."""

    def __init__(
        self,
        device: StreamDevice,
        program: CompiledGraph,
        forms: Sequence[Form],
        bounds: Sequence[Bound],
    ) -> None:
        self._device = device
        self._program = program
        self._forms = forms
        self._bounds = bounds

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
        with device.module.stream(lane.stream), device.precise():
            outputs = self._program([device.own(buffer) for buffer in inputs], donate)
            if not self._bounds:
                return outputs, StreamEvent(device.info.id, lane), ()
            extremes = device.own(outputs.pop()).tensor
            staged = device.pinned(tuple(extremes.shape), "int64")
            staged.copy_(extremes, non_blocking=True)
        check = partial(_check_indices, device.info.id, self._bounds, staged)
        return outputs, StreamEvent(device.info.id, lane, check), ()


def _check_indices(device_id: str, bounds: Sequence[Bound], extremes: torch.Tensor) -> None:
    check_extremes(device_id, bounds, extremes.tolist())
