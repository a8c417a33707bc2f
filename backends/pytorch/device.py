"""torch's devices: the common part, and the devices whose calls return when their work is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._ops import OpOverload

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Buffer, Device
from hetpipe.sdk.blocking import BlockingDevice
from hetpipe.sdk.graph import canonical, operator_name, why_not_fill
from hetpipe.sdk.indices import Bound
from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.support import require_support

from .choice import Chooser
from .guards import check_extremes, guarded
from .kernels import has_kernel
from .options import Options
from .program import Program, Way
from .replay import cuda_recorder

Array = np.ndarray[Any, Any]

DTYPES = (
    "float64", "float32", "float16", "bfloat16",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip


class TorchBuffer(Buffer):
    """A row-major torch tensor, with the shape that its graph declares.

    Only the workspaces of oneDNN have another shape; no other backend reads them.
    """

    def __init__(
        self, device: Device, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str
    ) -> None:
        self.device = device
        self.tensor = tensor
        self.shape = shape
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


def host_array(tensor: torch.Tensor) -> Array:
    """Return a CPU tensor's memory as an array. bfloat16, which numpy lacks, becomes int16."""
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)
    array: Array = tensor.numpy()
    return array


def copy_array(dst: Array, src: Array) -> None:
    """Copy an array; copy its bits if one side has a type that numpy lacks."""
    if src.dtype != dst.dtype and src.dtype.itemsize == dst.dtype.itemsize:
        src = src.view(dst.dtype)
    np.copyto(dst, src)


class CompiledGraph:
    """A graph, with a program for each set of donated inputs that has occurred."""

    def __init__(self, graph: fx.GraphModule, device: TorchDevice) -> None:
        self._graph = graph
        self._device = device
        self._programs: dict[frozenset[int], tuple[Program, Way]] = {}
        self.bounds: list[Bound] = []
        """Bounds of guarded indices, see `guarded`; on accelerators without streams."""

    def __call__(self, inputs: list[TorchBuffer], donate: frozenset[int]) -> list[Buffer]:
        """Run the graph, or start it on the current stream."""
        if len(set(map(id, inputs))) < len(inputs):  # do not donate a buffer that is two inputs
            donate = frozenset(i for i in donate if inputs.count(inputs[i]) == 1)
        device, tensors = self._device, [buffer.tensor for buffer in inputs]
        known = self._programs.get(donate)
        program = known[0] if known else self._program(donate)
        try:
            way = known[1] if known else device.chooser.way(self._graph, donate, program, tensors)
            self._programs[donate] = program, way
            with torch.inference_mode():
                results = way(tensors)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise program.explain(error) from error
        created = [
            TorchBuffer(device, tensor, *form)
            for tensor, form in zip(results, program.forms, strict=True)
        ]
        return [inputs[~i] if i < 0 else created[i] for i in program.outputs]

    def _program(self, donate: frozenset[int]) -> Program:
        device = self._device
        return Program(self._graph, donate, device.torch_device, device.info.id)


class TorchDevice(Device):
    """A `torch.device`; `operators` maps names of operators to functions that replace them."""

    def __init__(
        self,
        info: DeviceInfo,
        torch_device: torch.device,
        operators: Mapping[str, Callable[..., Any]] = {},
        options: Options = Options(),  # noqa: B008 - it is frozen
    ) -> None:
        self.info = info
        self.torch_device = torch_device
        self._operators = operators
        record = cuda_recorder(torch_device) if torch_device.type == "cuda" else None
        self.chooser = Chooser(info, options, torch_device, self._wait, record)

    def _wait(self) -> None:
        """Wait for the work of this thread's stream."""
        if self.torch_device.type != "cpu":
            torch.accelerator.current_stream(self.torch_device).synchronize()

    def supports(self, node: fx.Node) -> str | None:
        target = node.target
        if operator_name(node) in self._operators:
            return None
        if not isinstance(target, OpOverload):
            return None if operator_name(node) == "getitem" else "it is no torch operator"
        if (reason := why_not_fill(node)) is not None:
            return reason
        if has_kernel(target, self.torch_device.type):
            return None
        return f"torch has no kernel of this operator for {self.torch_device.type}"

    def prepare(self, graph: fx.GraphModule) -> CompiledGraph:
        require_support(self, graph)
        return CompiledGraph(with_operators(graph, self._operators), self)

    @contextmanager
    def blamed(self, doing: str) -> Iterator[None]:
        """Turn torch's errors in the block, such as a lack of memory, into `BackendError`."""
        try:
            yield
        except RuntimeError as error:
            raise BackendError(f"{self.info.id}: {doing} failed: {error}") from error

    def own(self, buffer: Buffer) -> TorchBuffer:
        """Return the buffer if it is on this device. Raises `BackendError` if it is not."""
        if not isinstance(buffer, TorchBuffer) or buffer.device.info.id != self.info.id:
            raise BackendError(f"{self.info.id} was given a buffer of {buffer.device.info.id}")
        return buffer


Function = Callable[..., Any]


def with_operators(graph: fx.GraphModule, operators: Mapping[str, Function]) -> fx.GraphModule:
    """Return the graph, with functions for the operators that `operators` names."""
    if not any(operator_name(node) in operators for node in graph.graph.nodes):
        return graph
    own = canonical(graph)
    for number, node in enumerate(list(own.graph.nodes)):
        if node.op == "call_function" and operator_name(node) in operators:
            node.target = _apart(operators[operator_name(node)], number)
            node.meta["opaque"] = True
    return own


def _apart(function: Function, number: int) -> Function:
    """Wrap a function, so that its results share no memory with its arguments; number its name."""

    def own(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        taken = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, (tuple, list)):
            return tuple(_copied(each, taken) for each in result)
        return _copied(result, taken)

    own.__name__ = f"own_{number}"
    return own


def _copied(value: Any, taken: set[int]) -> Any:
    shares = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in taken
    return value.clone() if shares else value


class CpuDevice(TorchDevice, BlockingDevice):
    """torch on the CPU, with as many threads as torch uses in this process."""

    def _compile(self, graph: fx.GraphModule) -> CompiledGraph:
        return CompiledGraph(with_operators(graph, self._operators), self)

    def _run(
        self, program: CompiledGraph, inputs: list[Buffer], donate: frozenset[int]
    ) -> list[Buffer]:
        return program([self.own(buffer) for buffer in inputs], donate)

    def _to_device(self, src: Array) -> TorchBuffer:
        dtype = src.dtype.name
        with self.blamed(f"uploading {src.nbytes} bytes"):
            tensor = torch.empty(src.shape, dtype=getattr(torch, dtype))
        buffer = TorchBuffer(self, tensor, src.shape, dtype)
        copy_array(host_array(buffer.tensor), src)
        return buffer

    def _to_host(self, buf: Buffer, dst: Array) -> None:
        copy_array(dst, host_array(self.own(buf).tensor))


class SynchronizedDevice(CpuDevice):
    """An accelerator without streams in torch (MPS): every call waits for its work."""

    def _compile(self, graph: fx.GraphModule) -> CompiledGraph:
        safe, bounds = guarded(graph)
        program = super()._compile(safe)
        program.bounds = bounds
        return program

    def _run(
        self, program: CompiledGraph, inputs: list[Buffer], donate: frozenset[int]
    ) -> list[Buffer]:
        outputs = super()._run(program, inputs, donate)
        torch.accelerator.synchronize(self.torch_device)
        if program.bounds:
            extremes = self.own(outputs.pop()).tensor
            check_extremes(self.info.id, program.bounds, extremes.tolist())
        return outputs

    def _to_device(self, src: Array) -> TorchBuffer:
        staged = super()._to_device(src)
        with self.blamed(f"uploading {src.nbytes} bytes"):
            tensor = torch.empty_like(staged.tensor, device=self.torch_device)
        tensor.copy_(staged.tensor)
        torch.accelerator.synchronize(self.torch_device)
        return TorchBuffer(self, tensor, staged.shape, staged.dtype)

    def _to_host(self, buf: Buffer, dst: Array) -> None:
        copy_array(dst, host_array(self.own(buf).tensor.cpu()))
