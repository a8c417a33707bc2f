"""The reference backend: numpy on the host. It favours simple, correct code over speed."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

import hetpipe.sdk.graph as graphs
from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend, Buffer
from hetpipe.sdk.blocking import BlockingDevice
from hetpipe.sdk.decompositions import VOLUME_CONVOLUTIONS, fallback_decompositions
from hetpipe.sdk.indices import index_bounds
from hetpipe.sdk.info import Capabilities, DeviceInfo, host_memory_nbytes

from .functions import Array
from .operators import OPERATORS

DTYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


class NumpyBackend(Backend):
    """Has one device: the numpy of this process."""

    name = "numpy"

    def discover(self) -> list[DeviceInfo]:
        info = DeviceInfo(
            id="numpy:cpu:0",
            backend="numpy",
            kind="cpu",
            name=platform.processor() or platform.machine(),
            vendor="numpy",
            driver=np.__version__,
            memory_nbytes=host_memory_nbytes(),
            memory_domain="host",
            dtypes=DTYPES,
            # The functions keep no state, so several threads may run passes at once.
            capabilities=Capabilities(queues=2, reference=True),
        )
        return [info]

    def open(self, info: DeviceInfo) -> NumpyDevice:
        return NumpyDevice(info)

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        ours = [name for name in OPERATORS if name.startswith("hetpipe.")]
        return {
            **graphs.primitive_decompositions(keep=ours),
            **fallback_decompositions(keep=OPERATORS),
            **VOLUME_CONVOLUTIONS,
        }


class NumpyBuffer(Buffer):
    """A C-contiguous array."""

    def __init__(self, device: NumpyDevice, array: Array) -> None:
        self.device, self.array = device, array
        self.shape, self.dtype = array.shape, array.dtype.name


class NumpyDevice(BlockingDevice):
    """Runs a graph node by node; `OPERATORS` has the function of each operator."""

    def __init__(self, info: DeviceInfo) -> None:
        self.info = info

    def supports(self, node: fx.Node) -> str | None:
        name = graphs.operator_name(node)
        if name not in OPERATORS:
            return "the reference has no such operator"
        if "convolution" in name and node.all_input_nodes[0].meta["val"].ndim != 4:
            return "the reference convolves in two dimensions only"
        if ("convolution" in name or "pool" in name) and True in node.args[5:8]:
            return "the reference has neither transposed convolution nor ceil_mode"
        if (reason := graphs.why_not_fill(node) or graphs.why_not_strided(node)) is not None:
            return reason
        lacking = {_dtype(used) for used in (node, *node.all_input_nodes)} - {*DTYPES, ""}
        return f"numpy has no {', '.join(sorted(lacking))}" if lacking else None

    def _compile(self, graph: fx.GraphModule) -> Any:
        calls = [(node, _dtype(node), index_bounds(node)) for node in graphs.graph_calls(graph)]
        return graphs.graph_inputs(graph), calls, graphs.graph_outputs(graph)

    def _run(self, program: Any, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        placeholders, calls, outputs = program
        buffers = dict(zip(placeholders, map(_own, inputs), strict=True))
        values: dict[fx.Node, Any] = {node: buffer.array for node, buffer in buffers.items()}
        for node, dtype, bounds in calls:
            for bound in bounds:  # numpy would silently count a negative index from the end
                bound.check(self.info.id, values[bound.index])
            name = graphs.operator_name(node)
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            try:
                with np.errstate(all="ignore"):  # infinities and NaN are ordinary results
                    result = OPERATORS[name](*args, **kwargs)
                    values[node] = np.asarray(result, dtype) if dtype else result
            except Exception as error:
                where = f"{self.info.id}: {name} of layer {node.meta.get('layer', '?')}"
                raise BackendError(f"{where} failed: {error}") from error
        for node in outputs:
            # Copy: the value may be a view of an input or of another output.
            if node not in buffers:
                buffers[node] = NumpyBuffer(self, values[node].copy(order="C"))
        return [buffers[node] for node in outputs]

    def _to_device(self, src: Array) -> NumpyBuffer:
        return NumpyBuffer(self, src.copy(order="C"))

    def _to_host(self, buf: Buffer, dst: Array) -> None:
        dst[...] = _own(buf).array


def _own(buffer: Buffer) -> NumpyBuffer:
    if not isinstance(buffer, NumpyBuffer):
        raise BackendError(f"numpy:cpu:0 was given a buffer of {buffer.device.info.id}")
    return buffer


def _dtype(node: fx.Node) -> str:
    """Return the dtype name of a node's value, or "" for a tuple, whose items getitem casts."""
    val = node.meta["val"]
    return graphs.dtype_name(val.dtype) if isinstance(val, torch.Tensor) else ""
