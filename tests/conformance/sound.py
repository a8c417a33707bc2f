"""A sound asynchronous device based on numpy, in which a test can break one method at a time.

run, download -> WorkQueue of the pass's queue -> `compute`: one node after another
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from hetpipe.backends.numpy.operators import OPERATORS
from torch import fx

from hetpipe.sdk import (
    DONE,
    Backend,
    BackendError,
    Buffer,
    Capabilities,
    Chunk,
    Device,
    DeviceInfo,
    Event,
    Executable,
    Group,
    Window,
    WorkQueue,
    check_inputs,
    dtype_name,
    graph_calls,
    graph_inputs,
    graph_outputs,
    index_bounds,
    input_forms,
    operator_name,
    primitive_decompositions,
    require_support,
)

Array = np.ndarray[Any, Any]
DTYPES = ("float32", "int64", "bool", "int32")


class SoundBuffer(Buffer):
    def __init__(self, device: SoundDevice, array: Array) -> None:
        self.device, self.array = device, array
        self.shape, self.dtype = array.shape, array.dtype.name


class SoundDevice(Device):
    def __init__(self, info: DeviceInfo) -> None:
        self.info = info
        self.queues = [WorkQueue(f"{info.id} {n}") for n in range(info.capabilities.queues)]
        self.copies = WorkQueue(f"{info.id} copies")
        self.sums = WorkQueue(f"{info.id} sums")

    def supports(self, node: fx.Node) -> str | None:
        if operator_name(node) not in OPERATORS:
            return "no kernel"
        values = [each.meta["val"] for each in (node, *node.all_input_nodes)]
        if "convolution" in operator_name(node) and values[1].ndim != 4:
            return "no kernel but for two dimensions"
        dtypes = {dtype_name(value.dtype) for value in values if hasattr(value, "dtype")}
        return None if dtypes <= set(DTYPES) else f"no kernel for {dtypes}"

    def compile(self, graph: fx.GraphModule) -> Executable:
        require_support(self, graph)
        return SoundExecutable(self, graph)

    def upload(self, src: Array) -> tuple[Buffer, Event]:
        array = np.empty(src.shape, src.dtype)
        event = self.copies.submit(lambda: np.copyto(array, src))
        return self.buffer(array), event

    def download(self, buf: Buffer, dst: Array) -> Event:
        array = self.own(buf).array
        return self.copies.submit(lambda: np.copyto(dst, array))

    def download_part(self, buf: Buffer, lo: int, hi: int, dst: Array) -> Event:
        array = self.own(buf).array
        return self.copies.submit(lambda: np.copyto(dst, array.reshape(-1)[lo:hi]))

    def open_window(self, nbytes: int) -> tuple[Window, bytes] | None:
        """Open a window in an anonymous file, whose path is the handle."""
        file = os.memfd_create("window")
        os.truncate(file, nbytes)
        path = f"/proc/{os.getpid()}/fd/{file}"
        window = self.map_window(path.encode(), nbytes)
        weakref.finalize(window, os.close, file)
        return window, path.encode()

    def map_window(self, handle: bytes, nbytes: int) -> Window:
        return self.window(np.memmap(handle.decode(), np.uint8, "r+", shape=(nbytes,)))

    def window(self, memory: Array) -> SoundWindow:
        return SoundWindow(self, memory)

    def join_group(self, folder: Path, rank: int, size: int) -> Group | None:
        (folder / str(rank)).touch()
        for other in range(size):
            _wait_for(folder / str(other))
        return self.group(folder, rank, size)

    def group(self, folder: Path, rank: int, size: int) -> SoundGroup:
        return SoundGroup(self, folder, rank, size)

    def buffer(self, array: Array) -> SoundBuffer:
        return SoundBuffer(self, array)

    def own(self, buffer: Buffer) -> SoundBuffer:
        if not isinstance(buffer, SoundBuffer):
            raise BackendError(f"{self.info.id} was given a buffer of another device")
        return buffer

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator."""
        return OPERATORS[operator_name(node)](*args, **kwargs)

    def check(self, node: fx.Node, values: Mapping[fx.Node, Array]) -> None:
        for bound in index_bounds(node):
            bound.check(self.info.id, values[bound.index])

    def memory_for(self, executable: SoundExecutable, nodes: Sequence[fx.Node]) -> list[Array]:
        """Return memory for results before they are computed."""
        metas = [node.meta["val"] for node in nodes]
        return [np.empty(tuple(meta.shape), dtype_name(meta.dtype)) for meta in metas]

    def submit(
        self, work: Callable[[], None], after: Sequence[Event], queue: int, held: Sequence[Buffer]
    ) -> Event:
        """Start a pass; the buffers in `held` must live until it has ended."""

        def holding(held: Sequence[Buffer] = held) -> None:
            work()

        return self.queues[queue].submit(holding, after)

    def store(
        self, executable: SoundExecutable, values: dict[fx.Node, Array], results: Sequence[Array],
        donated: Mapping[fx.Node, Array],
    ) -> None:  # fmt: skip
        """Copy the results of a pass into their memory."""
        for node, result in zip(executable.created, results, strict=True):
            np.copyto(result, values[node])

    def chunks(self, outputs: Sequence[Buffer], end: Event) -> Sequence[Chunk]:
        """Return the parts that are ready early."""
        return ()

    def close(self) -> None:
        for queue in (*self.queues, self.copies, self.sums):
            queue.close()


class SoundWindow(Window):
    def __init__(self, device: SoundDevice, memory: Array) -> None:
        self.device, self.memory = device, memory

    def write(self, src: Buffer, offset: int) -> Event:
        data = self.device.own(src).array.reshape(-1).view(np.uint8)
        part = self.memory[offset : offset + data.nbytes]
        return self.device.copies.submit(lambda: np.copyto(part, data))

    def read(self, offset: int, shape: tuple[int, ...], dtype: str) -> tuple[Buffer, Event]:
        array = np.empty(shape, dtype)
        part = self.memory[offset : offset + array.nbytes].view(dtype).reshape(shape)
        return self.device.buffer(array), self.device.copies.submit(lambda: np.copyto(array, part))


class SoundGroup(Group):
    """Devices that exchange their terms in files, and add them in the order of ranks."""

    def __init__(self, device: SoundDevice, folder: Path, rank: int, size: int) -> None:
        self.device, self.folder, self.rank, self.size = device, folder, rank, size
        self.calls = 0

    def sum(self, terms: Sequence[Buffer], scale: float) -> tuple[list[Buffer], Event]:
        arrays = [self.device.own(term).array for term in terms]
        call, self.calls = self.calls, self.calls + 1
        return list(terms), self.device.sums.submit(lambda: self.work(call, arrays, scale))

    def work(self, call: int, arrays: Sequence[Array], scale: float) -> None:
        """Replace the arrays by their sums."""
        for array in arrays:
            array *= array.dtype.type(scale)
        self.give(call, arrays)
        for array, addends in zip(arrays, self.taken(call), strict=True):
            array[...] = sum(addends[1:], addends[0])

    def give(self, call: int, arrays: Sequence[Array]) -> None:
        """Write this device's terms of a call."""
        part = self.folder / f"{call}-{self.rank}.part"
        with part.open("wb") as file:
            np.savez(file, *arrays)
        part.rename(part.with_suffix(".npz"))

    def taken(self, call: int) -> list[tuple[Array, ...]]:
        """Return the terms of all devices, for each tensor of a call."""
        paths = [self.folder / f"{call}-{rank}.npz" for rank in range(self.size)]
        for path in paths:
            _wait_for(path)
        return list(zip(*([*np.load(path).values()] for path in paths), strict=True))


def _wait_for(path: Path) -> None:
    end_s = time.monotonic() + 60
    while not path.exists():
        if time.monotonic() > end_s:
            raise BackendError(f"no other device has written {path}")
        time.sleep(1e-3)


class SoundExecutable(Executable):
    def __init__(self, device: SoundDevice, graph: fx.GraphModule) -> None:
        self.device = device
        self.forms = input_forms(graph)
        self.placeholders, self.calls = graph_inputs(graph), list(graph_calls(graph))
        self.outputs = graph_outputs(graph)
        self.created = [
            node for node in dict.fromkeys(self.outputs) if node not in self.placeholders
        ]

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        device = self.device
        check_inputs(device.info.id, inputs, self.forms)
        buffers: dict[fx.Node, Buffer] = dict(zip(self.placeholders, inputs, strict=True))
        arrays = {node: device.own(buffer).array for node, buffer in buffers.items()}
        donated = {self.placeholders[i]: arrays[self.placeholders[i]] for i in donate}
        results = device.memory_for(self, self.created)
        for node, array in zip(self.created, results, strict=True):
            buffers[node] = device.buffer(array)

        def work() -> None:
            device.store(self, self.compute(dict(arrays)), results, donated)

        event = device.submit(work, after, queue, list(buffers.values()))
        outputs = [buffers[node] for node in self.outputs]
        return outputs, event, device.chunks(outputs, event)

    def compute(self, values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
        for node in self.calls:
            self.device.check(node, values)
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            with np.errstate(all="ignore"):
                result = self.device.kernel(node, args, kwargs)
            meta = node.meta["val"]
            single = hasattr(meta, "dtype")
            values[node] = np.asarray(result, dtype_name(meta.dtype)) if single else result
        return values


class SoundBackend(Backend):
    name = "sound"
    device: ClassVar[type[SoundDevice]] = SoundDevice
    capabilities: ClassVar[Capabilities] = Capabilities(queues=2)

    def discover(self) -> list[DeviceInfo]:
        info = DeviceInfo(
            id=f"{self.name}:unit:0", backend=self.name, kind="other", name="sound", vendor="tests",
            driver="1", memory_nbytes=1 << 32, memory_domain="host", dtypes=DTYPES,
            capabilities=self.capabilities,
        )  # fmt: skip
        return [info]

    def open(self, info: DeviceInfo) -> Device:
        return self.device(info)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        ours = [name for name in OPERATORS if name.startswith("hetpipe.")]
        return primitive_decompositions(keep=ours)


__all__ = [
    "DONE",
    "Array",
    "SoundBackend",
    "SoundBuffer",
    "SoundDevice",
    "SoundExecutable",
    "SoundGroup",
    "SoundWindow",
]
