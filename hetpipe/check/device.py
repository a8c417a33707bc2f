"""Reference devices: torch's operators in float64, and in the dtypes that graphs declare.

A buffer of the float64 device reports the declared shape and dtype, but stores floating values in
float64. A download rounds them once to the declared dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from hetpipe.check.reference import to_float64
from hetpipe.sdk.backend import Buffer
from hetpipe.sdk.blocking import BlockingDevice
from hetpipe.sdk.graph import graph_outputs
from hetpipe.sdk.info import DTYPE_NBYTES, HOST_MEMORY, DeviceInfo
from hetpipe.sdk.inputs import Form, form_of


class ExactBuffer(Buffer):
    """A tensor with a declared shape and dtype; `ExactDevice` stores floating values in float64."""

    def __init__(self, device: ExactDevice, tensor: torch.Tensor, form: Form) -> None:
        self.device = device
        self.tensor = tensor
        self.shape, self.dtype = form


class ExactDevice(BlockingDevice):
    """Torch on this processor, in float64."""

    _as_computed = staticmethod(to_float64)
    """Convert the tensors and dtypes among an operator's arguments for the computation."""
    info = DeviceInfo(
        "exact:torch:0", "exact", "cpu", "torch in float64", "", torch.__version__, 0, HOST_MEMORY,
        tuple(DTYPE_NBYTES),
    )  # fmt: skip

    def supports(self, node: fx.Node) -> str | None:
        return None

    def _compile(self, graph: fx.GraphModule) -> fx.GraphModule:
        return graph

    def _run(self, program: Any, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        tensors = [buffer.tensor for buffer in inputs if isinstance(buffer, ExactBuffer)]
        with torch.no_grad():
            results = _Run(program, self._as_computed).run(*tensors)
        given = {id(tensor): buffer for tensor, buffer in zip(tensors, inputs, strict=True)}
        forms = map(form_of, graph_outputs(program))
        return [
            given.get(id(result)) or ExactBuffer(self, result, form)
            for result, form in zip(results, forms, strict=True)
        ]

    def _to_device(self, src: np.ndarray[Any, Any]) -> Buffer:
        tensor = torch.from_numpy(np.array(src, order="C"))
        return ExactBuffer(self, self._as_computed(tensor), (src.shape, str(src.dtype)))

    def _to_host(self, buf: Buffer, dst: np.ndarray[Any, Any]) -> None:
        assert isinstance(buf, ExactBuffer)
        np.copyto(dst, buf.tensor.numpy(), casting="same_kind")


class RoundingDevice(ExactDevice):
    """Torch on this processor, in the declared dtypes."""

    _as_computed = staticmethod(lambda values: values)


class _Run(fx.Interpreter):
    """Runs a graph on converted arguments, and drops each value after its last use."""

    def __init__(self, program: fx.GraphModule, as_computed: Callable[[Any], Any]) -> None:
        super().__init__(program)
        self._as_computed = as_computed

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        called = self._as_computed(args), self._as_computed(kwargs)
        result = super().call_function(target, *called)
        # Graphs declare results in row-major order.
        return tree_map_only(torch.Tensor, torch.Tensor.contiguous, result)
