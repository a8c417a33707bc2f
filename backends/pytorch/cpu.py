"""Devices whose calls return when the work is done: the CPU, and accelerators without streams."""

from __future__ import annotations

import torch
from torch import fx

from hetpipe.sdk.backend import Buffer
from hetpipe.sdk.blocking import BlockingDevice

from .device import Array, CompiledGraph, TorchBuffer, TorchDevice, copy_array, host_array
from .own import with_operators


class CpuDevice(TorchDevice, BlockingDevice):
    """torch on the CPU, with the number of threads that the process has."""

    def _compile(self, graph: fx.GraphModule) -> CompiledGraph:
        return CompiledGraph(with_operators(graph, self._operators), self)

    def _run(
        self, program: CompiledGraph, inputs: list[Buffer], donate: frozenset[int]
    ) -> list[Buffer]:
        return program([self.own(buffer) for buffer in inputs], donate)

    def _to_device(self, src: Array) -> TorchBuffer:
        dtype = src.dtype.name
        tensor = torch.empty(src.shape, dtype=getattr(torch, dtype))
        buffer = TorchBuffer(self, tensor, src.shape, dtype)
        copy_array(host_array(buffer.tensor), src)
        return buffer

    def _to_host(self, buf: Buffer, dst: Array) -> None:
        copy_array(dst, host_array(self.own(buf).tensor))


class SynchronizedDevice(CpuDevice):
    """An accelerator without streams in torch (MPS): every call waits until it is done."""

    def _run(
        self, program: CompiledGraph, inputs: list[Buffer], donate: frozenset[int]
    ) -> list[Buffer]:
        outputs = super()._run(program, inputs, donate)
        torch.accelerator.synchronize(self.torch_device)
        return outputs

    def _to_device(self, src: Array) -> TorchBuffer:
        staged = super()._to_device(src)
        tensor = torch.empty_like(staged.tensor, device=self.torch_device)
        tensor.copy_(staged.tensor)
        torch.accelerator.synchronize(self.torch_device)
        return TorchBuffer(self, tensor, staged.shape, staged.dtype)

    def _to_host(self, buf: Buffer, dst: Array) -> None:
        copy_array(dst, host_array(self.own(buf).tensor.cpu()))
