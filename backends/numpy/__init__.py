"""The reference backend: numpy on the host, made to be read and to be right."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend, BlockingDevice, Buffer
from hetpipe.sdk.graph import dtype_name, graph_calls, graph_inputs, graph_outputs, operator_name
from hetpipe.sdk.info import Capabilities, DeviceInfo

from .operators import OPERATORS

if TYPE_CHECKING:
    from torch import fx

Array = np.ndarray[Any, Any]

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


class NumpyBackend(Backend):
    """One device: this process's numpy."""

    name = "numpy"

    def discover(self) -> list[DeviceInfo]:
        return [
            DeviceInfo(
                id="numpy:cpu:0",
                backend="numpy",
                kind="cpu",
                name=platform.processor() or platform.machine(),
                vendor="numpy",
                driver=np.__version__,
                memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                memory_domain="host",
                dtypes=DTYPES,
                capabilities=Capabilities(reference=True),
            )
        ]

    def open(self, info: DeviceInfo) -> NumpyDevice:
        return NumpyDevice(info)

    def worker_environment(self, info: DeviceInfo, cores: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(cores), "OPENBLAS_NUM_THREADS": str(cores)}


class NumpyBuffer(Buffer):
    """A C-contiguous array."""

    def __init__(self, device: NumpyDevice, array: Array) -> None:
        self.device = device
        self.array = array
        self.shape = array.shape
        self.dtype = array.dtype.name


@dataclass(frozen=True)
class _Call:
    """One node: what to call, what its result is cast to, and which values die with it."""

    node: fx.Node
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    dtype: Any  # of the result; a tuple of them where there are several
    dead: tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Program:
    inputs: list[fx.Node]
    calls: list[_Call]
    outputs: list[fx.Node]


class NumpyDevice(BlockingDevice):
    """Interprets a graph node by node, each with a function of the table `OPERATORS`."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    def supports(self, node: fx.Node) -> str | None:
        if operator_name(node) not in OPERATORS:
            return "the reference has no such operator"
        for used in (node, *node.all_input_nodes):
            for name in _flat(_dtypes(used.meta["val"])):
                if name not in DTYPES:
                    return f"numpy has no {name}"
        return None

    def _compile(self, graph: fx.GraphModule) -> _Program:
        outputs = graph_outputs(graph)
        last_use: dict[fx.Node, fx.Node] = {}
        for node in graph_calls(graph):
            last_use |= dict.fromkeys((node, *node.all_input_nodes), node)
        calls = []
        for node in graph_calls(graph):
            args, kwargs = _without_torch(node.args), _without_torch(node.kwargs)
            dead = tuple(n for n, end in last_use.items() if end is node and n not in outputs)
            dtype = _dtypes(node.meta["val"])
            calls.append(_Call(node, OPERATORS[operator_name(node)], args, kwargs, dtype, dead))
        return _Program(graph_inputs(graph), calls, outputs)

    def _run(self, program: _Program, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        buffers = {node: _own(buffer) for node, buffer in zip(program.inputs, inputs, strict=True)}
        values: dict[fx.Node, Any] = {node: buffer.array for node, buffer in buffers.items()}
        with np.errstate(all="ignore"):
            for call in program.calls:
                args, kwargs = _fill(call.args, values), _fill(call.kwargs, values)
                try:
                    values[call.node] = _cast(call.function(*args, **kwargs), call.dtype)
                except Exception as error:
                    raise BackendError(
                        f"{self.info.id}: {operator_name(call.node)} of layer "
                        f"{call.node.meta.get('layer', '?')} failed: {error}"
                    ) from error
                for node in call.dead:
                    del values[node]
        for node in program.outputs:
            if node not in buffers:  # copied: it may be a view of an input or of another output
                buffers[node] = NumpyBuffer(self, values[node].copy(order="C"))
        return [buffers[node] for node in program.outputs]

    def _to_device(self, src: Array, dst: Buffer | None) -> NumpyBuffer:
        if dst is None:
            return NumpyBuffer(self, src.copy(order="C"))
        buffer = _own(dst)
        buffer.array[...] = src
        return buffer

    def _to_host(self, buf: Buffer, dst: Array) -> None:
        dst[...] = _own(buf).array


def _own(buffer: Buffer) -> NumpyBuffer:
    if not isinstance(buffer, NumpyBuffer):
        raise BackendError(f"numpy:cpu:0 was given a buffer of {buffer.device.info.id}")
    return buffer


def _dtypes(val: Any) -> Any:
    """The dtype name of a node's value, in the nesting of the value itself."""
    if isinstance(val, tuple):
        return tuple(_dtypes(item) for item in val)
    return None if val is None else dtype_name(val.dtype)


def _flat(names: Any) -> list[str]:
    return [name for name in (names if isinstance(names, tuple) else (names,)) if name is not None]


def _cast(value: Any, dtype: Any) -> Any:
    """The arrays of a result in the dtypes that the graph promises."""
    if isinstance(dtype, tuple):
        return tuple(_cast(item, one) for item, one in zip(value, dtype, strict=True))
    return None if dtype is None else np.asarray(value, dtype=dtype)


def _without_torch(arg: Any) -> Any:
    """Arguments with `torch.dtype` replaced by numpy's (every other kind is plain or a node)."""
    if isinstance(arg, (list, tuple)):
        return type(arg)(_without_torch(item) for item in arg)
    if isinstance(arg, dict):
        return {key: _without_torch(item) for key, item in arg.items()}
    return np.dtype(dtype_name(arg)) if type(arg).__name__ == "dtype" else arg


def _fill(arg: Any, values: dict[fx.Node, Any]) -> Any:
    """Arguments with nodes replaced by their values."""
    if isinstance(arg, (list, tuple)):
        return [_fill(item, values) for item in arg]
    if isinstance(arg, dict):
        return {key: _fill(item, values) for key, item in arg.items()}
    try:
        return values.get(arg, arg)
    except TypeError:  # a slice or another unhashable literal
        return arg
