"""The host's CPU: every call returns when its work is done."""

from __future__ import annotations

import torch
from torch import fx

from hetpipe.sdk.backend import BlockingDevice, Buffer

from .device import Array, CompiledGraph, TorchBuffer, TorchDevice, copy_array, host_array


class CpuDevice(TorchDevice, BlockingDevice):
    """torch on the CPU, with as many threads as the process was started with."""

    def _compile(self, graph: fx.GraphModule) -> CompiledGraph:
        return CompiledGraph(graph, self)

    def _run(
        self, program: CompiledGraph, inputs: list[Buffer], donate: frozenset[int]
    ) -> list[Buffer]:
        return program([self.own(buffer) for buffer in inputs], donate)

    def _to_device(self, src: Array, dst: Buffer | None) -> TorchBuffer:
        if dst is not None:
            buffer = self.own(dst)
        else:
            dtype = src.dtype.name
            tensor = torch.empty(src.shape, dtype=getattr(torch, dtype))
            buffer = TorchBuffer(self, tensor, src.shape, dtype)
        copy_array(host_array(buffer.tensor), src)
        return buffer

    def _to_host(self, buf: Buffer, dst: Array) -> None:
        copy_array(dst, host_array(self.own(buf).tensor))
