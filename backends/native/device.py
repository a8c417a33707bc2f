"""A device of a vendor's library: its memory, its copies, its compiled graphs and their runs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx

from hetpipe.errors import BackendError, UnsupportedOperatorError
from hetpipe.sdk import graph as graphs
from hetpipe.sdk.backend import DONE, Buffer, Chunk, Device, Event, Executable
from hetpipe.sdk.formats.serialised import serialise, serialise_rows
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.inputs import Form, check_inputs, form_of, input_forms
from hetpipe.sdk.support import require_support

from .events import NativeEvent, drain, keep_for_ever, sweep
from .library import Handle, Library, interface

Array = np.ndarray[Any, Any]


class NativeBuffer(Buffer):
    """A tensor on a device. `memory` is None after a run has used the memory for an output."""

    def __init__(self, device: NativeDevice, form: Form, memory: Handle) -> None:
        self.device = device
        self.shape, self.dtype = form
        self.memory: Handle | None = memory


class NativeDevice(Device):
    """An opened device of a library. The device closes when `handle` is deleted."""

    def __init__(self, info: DeviceInfo, library: Library, index: int) -> None:
        self.info, self.library = info, library
        out = interface().new("hetpipe_device **")
        library.call(f"{info.id} cannot be opened", "open", index, out)
        self.handle = Handle(self.given("open", out), library.function("close"), library)
        self._reasons: dict[bytes, str | None] = {}

    def supports(self, node: fx.Node) -> str | None:
        if node.target is operator.getitem:
            return None  # no work for the library: getitem picks one of several results
        if node.meta["val"] is None:
            return "the operator has no result"
        used = [source.meta["val"] for source in (node, *node.all_input_nodes)]
        tensors = [t for val in used for t in (val if isinstance(val, tuple) else (val,))]
        dtypes = {graphs.dtype_name(t.dtype) for t in tensors if t is not None}
        casts = node.target is torch.ops.aten._to_copy.default
        known = {*self.info.dtypes, *(self.info.cast_dtypes if casts else ())}
        if lacking := dtypes - known:
            return f"the device has no {', '.join(sorted(lacking))}"
        try:
            data = serialise(_alone(node))
        except BackendError as error:
            return str(error)
        if data not in self._reasons:
            self._reasons[data] = self._refusal(data)
        return self._reasons[data]

    def _refusal(self, data: bytes) -> str | None:
        try:
            if self.library.function("supports") is None:
                self._compiled("", data)
            else:
                self.library.call("", "supports", self.handle.pointer, data, len(data))
        except UnsupportedOperatorError as error:
            return str(error).removeprefix(": ")
        return None

    def compile(self, graph: fx.GraphModule) -> Executable:
        require_support(self, graph)
        placeholders, outputs = graphs.graph_inputs(graph), graphs.graph_outputs(graph)
        computed = list(dict.fromkeys(node for node in outputs if node.op != "placeholder"))
        *rows, last = graphs.graph_rows(graph)
        numbers = {row[1]: ("node", number) for number, row in enumerate(rows)}
        returned = ("list", [numbers[node.name] for node in computed])
        data = serialise_rows([*rows, (*last[:3], ("list", [returned]), *last[4:])])
        program = None
        if computed:
            program = self._compiled(f"{self.info.id} cannot compile a graph", data)
        places = [
            ~placeholders.index(node) if node.op == "placeholder" else computed.index(node)
            for node in outputs
        ]
        forms = tuple(map(form_of, computed))
        return NativeExecutable(self, program, input_forms(graph), forms, places)

    def _compiled(self, doing: str, data: bytes) -> Handle:
        out = interface().new("hetpipe_program **")
        self.library.call(doing, "compile", self.handle.pointer, data, len(data), out)
        give_back = self.library.function("release_program")
        return Handle(self.given("compile", out), give_back, self.handle)

    def upload(self, src: Array) -> tuple[Buffer, Event]:
        dtype = src.dtype.name
        if dtype not in (*self.info.dtypes, *self.info.cast_dtypes):
            there = ", ".join(self.info.dtypes)
            raise BackendError(f"{self.info.id} has no {dtype}; it has {there}")
        sweep()
        dense = np.ascontiguousarray(src)
        out = interface().new("hetpipe_buffer **")
        doing = f"{self.info.id}: no buffer of {dense.nbytes} bytes"
        self.library.call(doing, "allocate", self.handle.pointer, dense.nbytes, out)
        memory = self.memory(self.given("allocate", out))
        buffer = NativeBuffer(self, (tuple(src.shape), dtype), memory)
        copy = partial(self._copy, "upload", memory.pointer, dense.ctypes.data, dense.nbytes)
        return buffer, copy((memory, dense)) if dense.nbytes else DONE

    def download(self, buf: Buffer, dst: Array) -> Event:
        sweep()
        memory = self.memory_of(buf)
        if not buf.nbytes:
            return DONE
        keeps = (memory, dst)
        return self._copy("download", memory.pointer, dst.ctypes.data, buf.nbytes, keeps)

    def memory(self, pointer: Any) -> Handle:
        """Return the handle of a library's buffer; the buffer is freed with the handle."""
        return Handle(pointer, self.library.function("free"), self.handle)

    def memory_of(self, buffer: Buffer) -> Handle:
        """Return a buffer's memory. Raises `BackendError` for a donated or foreign buffer."""
        if not isinstance(buffer, NativeBuffer) or buffer.device is not self:
            raise BackendError(f"{self.info.id} was given a buffer of {buffer.device.info.id}")
        if buffer.memory is None:
            raise BackendError(f"{self.info.id}: a buffer is used after it was donated")
        return buffer.memory

    def event(self, pointer: Any, keeps: Sequence[object]) -> Event:
        """Return the event of some work; until the work ends, the event holds the objects `keeps`.

        If `pointer` is NULL, the work has ended already.
        """
        if pointer == interface().NULL:
            return DONE
        give_back = self.library.function("release_event")
        if give_back is None:
            path = self.library.path
            keep_for_ever(keeps)
            raise BackendError(
                f"{path} returns events but lacks the functions wait and release_event; add them"
            )
        handle = Handle(pointer, give_back, self.handle)
        return NativeEvent(self, self.library, handle, keeps)

    def given(self, name: str, out: Any) -> Any:
        """Return the result of a successful call. Raises `BackendError` for NULL."""
        if out[0] == interface().NULL:
            raise BackendError(f"{self.library.path}: {name} succeeds, and gives NULL")
        return out[0]

    def _copy(
        self, name: str, pointer: Any, address: int, nbytes: int, keeps: Sequence[object]
    ) -> Event:
        event = interface().new("hetpipe_event **")
        host = interface().cast("void *", address)
        self.library.call(f"{self.info.id}: {name}", name, pointer, host, nbytes, event)
        return self.event(event[0], keeps)

    def memory_used_nbytes(self) -> int | None:
        if self.library.function("memory_used") is None:
            return None
        sweep()
        out = interface().new("uint64_t *")
        self.library.call(self.info.id, "memory_used", self.handle.pointer, out)
        return int(out[0])

    def close(self) -> None:
        """Wait for all work. The library closes the device after its last buffer is freed."""
        drain(self)


class NativeExecutable(Executable):
    """A graph that a library has compiled; `program` is None if the graph computes nothing.

    For each output of the graph, `places` has the index of the program's output, or `~i` if the
    output is placeholder i.
    """

    def __init__(
        self,
        device: NativeDevice,
        program: Handle | None,
        inputs: Sequence[Form],
        outputs: Sequence[Form],
        places: Sequence[int],
    ) -> None:
        self._device = device
        self._program = program
        self._inputs, self._outputs = inputs, outputs
        self._places = places

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        device = self._device
        check_inputs(device.info.id, inputs, self._inputs)
        memories = [device.memory_of(buffer) for buffer in inputs]
        sweep()
        earlier = self._order(after)
        if self._program is None:
            return [inputs[~place] for place in self._places], DONE, ()
        # A buffer that is two inputs, or an input and an output, is not donated.
        going_on = {~place for place in self._places if place < 0}
        given = {i for i in donate - going_on if memories.count(memories[i]) == 1}
        pointers, made, event = self._queue(memories, given, earlier, queue)
        buffers = []
        for pointer, form in zip(pointers, self._outputs, strict=True):
            buffers.append(NativeBuffer(device, form, self._claim(pointer, memories, given)))
            made.append(buffers[-1].memory)
        for memory, buffer in zip(memories, inputs, strict=True):
            if memory in made:
                assert isinstance(buffer, NativeBuffer)
                buffer.memory = None
        return [inputs[~p] if p < 0 else buffers[p] for p in self._places], event, ()

    def _order(self, after: Sequence[Event]) -> list[Handle]:
        """Wait for the events that the library cannot wait for; return the other events' handles.

        Raises the errors of failed events.
        """
        handles = []
        for event in after:
            handle = None
            if isinstance(event, NativeEvent) and event.device is self._device:
                handle = event.pending if self._program is not None else None
            if handle is None:
                event.wait()
            else:
                handles.append(handle)
        return handles

    def _queue(
        self, memories: list[Handle], given: set[int], earlier: list[Handle], queue: int
    ) -> tuple[list[Any], list[Handle | None], Event]:
        """Queue the run; return the outputs' pointers, a list for their handles, and the event.

        The event holds the list, so the outputs' memory lasts until the run ends.
        """
        ffi, device, program = interface(), self._device, self._program
        assert program is not None
        outputs = ffi.new("hetpipe_buffer *[]", len(self._outputs))
        event = ffi.new("hetpipe_event **")
        device.library.call(
            device.info.id,
            "run",
            program.pointer,
            queue,
            ffi.new("hetpipe_buffer *[]", [memory.pointer for memory in memories]),
            bytes(i in given for i in range(len(memories))),
            outputs,
            ffi.new("hetpipe_event *[]", [handle.pointer for handle in earlier]),
            len(earlier),
            event,
        )
        made: list[Handle | None] = []
        ended = device.event(event[0], [program, memories, earlier, made])
        return list(outputs), made, ended

    def _claim(self, pointer: Any, memories: list[Handle], given: set[int]) -> Handle:
        """Return the handle of an output: a new one, or the handle of a donated input."""
        path = self._device.library.path
        if pointer == interface().NULL:
            raise BackendError(f"{path}: run succeeds, and an output is NULL")
        for number, memory in enumerate(memories):
            if memory.pointer == pointer and number not in given:
                raise BackendError(
                    f"{path}: run returns input {number}, which was not donated "
                    "or is an output already"
                )
            if memory.pointer == pointer:
                given.remove(number)
                return memory
        return self._device.memory(pointer)


def _alone(node: fx.Node) -> fx.Graph:
    """Return a graph that has only this call; all results of the call are outputs."""
    graph = fx.Graph()
    inputs: dict[fx.Node, fx.Node] = {}
    for number, source in enumerate(node.all_input_nodes):
        inputs[source] = graph.placeholder(f"x{number}")
        inputs[source].meta["val"] = source.meta["val"]
    assert callable(node.target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
    call = graph.create_node("call_function", node.target, args, kwargs, name="call")
    call.meta["val"] = val = node.meta["val"]
    outputs = [call]
    if not isinstance(val, torch.Tensor):
        outputs = [graph.call_function(operator.getitem, (call, i)) for i in range(len(val))]
        for item, result in zip(outputs, val, strict=True):
            item.meta["val"] = result
    graph.output(tuple(item for item in outputs if item.meta["val"] is not None))
    return graph
