"""A device of a library, whose functions provide memory, copies and compiled graphs."""

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
from hetpipe.sdk.backend import DONE, Buffer, Event, Executable
from hetpipe.sdk.formats.serialised import serialise, serialise_rows
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.inputs import form_of, input_forms
from hetpipe.sdk.support import require_support

from .events import drain, sweep
from .library import Handle, Library, interface
from .opened import NativeBuffer, OpenedDevice
from .program import NativeExecutable

Array = np.ndarray[Any, Any]


class NativeDevice(OpenedDevice):
    """An opened device of a library."""

    def __init__(self, info: DeviceInfo, library: Library, index: int) -> None:
        super().__init__(info, library, index)
        self._reasons: dict[bytes, str | None] = {}

    # Graphs.

    def supports(self, node: fx.Node) -> str | None:
        if node.target is operator.getitem:
            return None  # taking one of several results is no work
        if node.meta["val"] is None:
            return "it has no result"
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

    # Memory.

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
        """Wait for all work. The library's device closes after its last buffer is freed."""
        drain(self)


def _alone(node: fx.Node) -> fx.Graph:
    """Return a graph with one call; if the call has several results, all of them are outputs."""
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
