"""Accelerators with streams (CUDA, ROCm, XPU): computing and both directions of copy overlap."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from hetpipe.sdk.backend import DONE, Buffer, Chunk, Event, Executable, Group, Window
from hetpipe.sdk.events import Signal, finish
from hetpipe.sdk.indices import Bound
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.inputs import Form, check_inputs, input_forms

from .device import Array, CompiledGraph, TorchBuffer, TorchDevice, copy_array, host_array
from .groups import AllReduce, nccl_all_reduce, sum_in_place
from .guards import check_extremes, guarded
from .lanes import Lane, StreamEvent
from .options import Options
from .pinning import PinnedMemory

RESERVE, RESERVE_NBYTES = 0.05, 512 << 20
"""The part of a card's memory, and the bytes, that plans leave free. cuBLAS takes up to 32 MiB for
each stream, the driver loads kernels at their first launch, and torch's allocator, which takes
memory in blocks of 2 to 20 MiB, leaves gaps. The sum is an estimate: it was measured on no card."""


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
        self._has_windows = options.peer_copies
        self._sums_by_nccl = options.nccl
        self.compute = Lane(module, torch_device, f"{info.id} compute")
        self.incoming = Lane(module, torch_device, f"{info.id} in")
        self.outgoing = Lane(module, torch_device, f"{info.id} out")

    def compile(self, graph: fx.GraphModule) -> Executable:
        safe, bounds = guarded(graph)
        return _StreamExecutable(self, self.prepare(safe), input_forms(graph), bounds)

    def upload(self, src: Array) -> tuple[Buffer, Event]:
        src = np.asarray(src)  # a scalar of numpy has no memory
        lane, dtype = self.incoming, src.dtype.name
        with self.blamed(f"uploading {src.nbytes} bytes"), self.module.stream(lane.stream):
            # The device's memory first: if it does not suffice, the host needs none.
            tensor = torch.empty(src.shape, dtype=getattr(torch, dtype), device=self.torch_device)
            staged = self._pins.tensor(src)
            if staged is None:
                staged = self.pinned(src.shape, dtype)
                copy_array(host_array(staged), src)
            tensor.copy_(staged, non_blocking=True)
            self.keep_for(tensor, self.compute)
            return TorchBuffer(self, tensor, src.shape, dtype), StreamEvent(self.info.id, lane)

    def download(self, buf: Buffer, dst: Array) -> Event:
        lane, tensor = self.outgoing, self.own(buf).tensor
        if not dst.size:  # unused statistics of a norm are empty on processors, but not on cards
            return DONE
        direct = self._pins.tensor(dst)
        with self.blamed(f"downloading {buf.nbytes} bytes"), self.module.stream(lane.stream):
            staged = self.pinned(buf.shape, buf.dtype) if direct is None else direct
            # Memory of the host has int16 for bfloat16, which numpy lacks.
            staged.copy_(tensor.view(staged.dtype), non_blocking=True)
            self.keep_for(tensor, lane)
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
            for lane in (self.incoming, self.outgoing):
                lane.stream.synchronize()
            end()

        return unpin

    def open_window(self, nbytes: int) -> tuple[Window, bytes] | None:
        if not self._has_windows:
            return None
        with self.blamed(f"opening a window of {nbytes} bytes"):
            memory, handle = self.shared_memory(nbytes)
        return CardWindow(self, memory), handle

    def map_window(self, handle: bytes, nbytes: int) -> Window:
        with self.blamed(f"mapping a window of {nbytes} bytes"):
            return CardWindow(self, self.mapped_memory(handle, nbytes))

    def join_group(self, folder: Path, rank: int, size: int) -> Group | None:
        if not self._sums_by_nccl:
            return None
        with self.blamed(f"joining {size} cards to sum by NCCL"):
            return CardGroup(self, self.all_reduce(folder, rank, size))

    def all_reduce(self, folder: Path, rank: int, size: int) -> AllReduce:
        """Return a function that sums tensors over cards."""
        return nccl_all_reduce(self.torch_device, folder, rank, size)

    def shared_memory(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        """Return new memory of the card, and a handle of it for another process."""
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        storage: Any = memory.untyped_storage()
        return memory, pickle.dumps(storage._share_cuda_())

    def mapped_memory(self, handle: bytes, nbytes: int) -> torch.Tensor:
        """Return the memory of another process. Raises torch's error if it is out of reach."""
        storage = torch.UntypedStorage._new_shared_cuda(*pickle.loads(handle))
        memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return memory[:nbytes]

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

    def keep_for(self, tensor: torch.Tensor, lane: Lane) -> None:
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
        for lane in (self.compute, self.incoming, self.outgoing):
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


class CardWindow(Window):
    """A window over `memory`, flat bytes of a card (CUDA IPC, HIP IPC); `device` copies."""

    def __init__(self, device: StreamDevice, memory: torch.Tensor) -> None:
        self._device = device
        self._memory = memory

    def write(self, src: Buffer, offset: int) -> Event:
        device, tensor = self._device, self._device.own(src).tensor
        lane = device.outgoing
        with device.blamed(f"sending {tensor.nbytes} bytes"), device.module.stream(lane.stream):
            part = self._part(offset, tuple(tensor.shape), tensor.dtype)
            part.copy_(tensor, non_blocking=True)
            device.keep_for(tensor, lane)
            return StreamEvent(device.info.id, lane)

    def read(self, offset: int, shape: tuple[int, ...], dtype: str) -> tuple[Buffer, Event]:
        device, lane = self._device, self._device.incoming
        with device.blamed("receiving a message"), device.module.stream(lane.stream):
            part = self._part(offset, shape, getattr(torch, dtype))
            tensor = torch.empty(shape, dtype=part.dtype, device=device.torch_device)
            tensor.copy_(part, non_blocking=True)
            device.keep_for(tensor, device.compute)
            return TorchBuffer(device, tensor, shape, dtype), StreamEvent(device.info.id, lane)

    def _part(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self._memory[offset : offset + nbytes].view(dtype).view(shape)


class CardGroup(Group):
    """Cards that sum tensors in place, on a stream for sums."""

    def __init__(self, device: StreamDevice, all_reduce: AllReduce) -> None:
        self._device = device
        self._all_reduce = all_reduce
        self._lane = Lane(device.module, device.torch_device, f"{device.info.id} sums")

    def sum(self, terms: Sequence[Buffer], scale: float) -> tuple[list[Buffer], Event]:
        device, lane = self._device, self._lane
        tensors = [device.own(term).tensor for term in terms]
        with device.blamed("summing tensors over cards"), device.module.stream(lane.stream):
            with torch.inference_mode():
                sum_in_place(tensors, scale, self._all_reduce)
            for tensor in tensors:
                device.keep_for(tensor, lane)
            return list(terms), StreamEvent(device.info.id, lane)
