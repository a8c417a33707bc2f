"""A base class for small backends: devices whose calls return when their work is done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hetpipe.sdk.backend import DONE, Buffer, Chunk, Device, Event, Executable
from hetpipe.sdk.inputs import Form, check_inputs, input_forms

if TYPE_CHECKING:
    import numpy as np
    import torch.fx


class BlockingDevice(Device):
    """A device whose calls return when their work is done.

    A subclass sets `info`, and defines only `supports` and the four abstract methods below. It
    needs no events and no chunks. `_run`, `_to_device` and `_to_host` may be called at the same
    time, with different buffers.
    """

    @abstractmethod
    def _run(self, program: Any, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        """Run `program`, a result of `_compile`, on `inputs`, and return its outputs."""

    @abstractmethod
    def _compile(self, graph: torch.fx.GraphModule) -> Any:
        """Turn a graph into any object that `_run` understands."""

    @abstractmethod
    def _to_device(self, src: np.ndarray[Any, Any]) -> Buffer:
        """Copy a host array to a new buffer."""

    @abstractmethod
    def _to_host(self, buf: Buffer, dst: np.ndarray[Any, Any]) -> None:
        """Copy a buffer to a host array."""

    def compile(self, graph: torch.fx.GraphModule) -> Executable:
        from hetpipe.sdk.support import require_support

        require_support(self, graph)
        return _BlockingExecutable(self, self._compile(graph), input_forms(graph))

    def upload(self, src: np.ndarray[Any, Any]) -> tuple[Buffer, Event]:
        return self._to_device(src), DONE

    def download(self, buf: Buffer, dst: np.ndarray[Any, Any]) -> Event:
        self._to_host(buf, dst)
        return DONE


class _BlockingExecutable(Executable):
    def __init__(self, device: BlockingDevice, program: Any, forms: Sequence[Form]) -> None:
        self._device = device
        self._program = program
        self._forms = forms

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        check_inputs(self._device.info.id, inputs, self._forms)
        for event in after:
            event.wait()
        return self._device._run(self._program, list(inputs), donate), DONE, ()
