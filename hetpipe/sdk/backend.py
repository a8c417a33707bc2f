"""The backend contract: all that a hardware maker implements.

A backend finds devices and opens them. A device compiles graphs and moves tensors. An executable
runs. Host tensors are C-contiguous numpy arrays; everything that crosses a graph's boundary is
row-major.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.sdk.info import DeviceInfo
from hetpipe.sdk.inputs import Form, check_inputs, input_forms

if TYPE_CHECKING:
    import torch

DTYPE_NBYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class Event(ABC):
    """The end of work on a device."""

    @abstractmethod
    def done(self) -> bool:
        """Whether it has ended; raises the device's error if it failed."""

    @abstractmethod
    def on_done(self, fn: Callable[[], None]) -> None:
        """Call `fn` once when it ends (at once if it has); possibly on a thread of the driver."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it ends. Raises `BackendError` on failure or after `timeout_s`."""

    @property
    def span_s(self) -> tuple[float, float] | None:
        """Start and end on the device's own clock, in seconds, if it has one."""
        return None


class DoneEvent(Event):
    """An event that has already happened."""

    def done(self) -> bool:
        return True

    def on_done(self, fn: Callable[[], None]) -> None:
        fn()

    def wait(self, timeout_s: float | None = None) -> None:
        return


DONE = DoneEvent()


class Buffer(ABC):
    """A row-major tensor in a device's memory. Immutable unless donated."""

    device: Device
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


Chunk = tuple[int, int, int, Event]
"""(output, lo, hi, event): elements lo..hi of that output, in row-major order, are ready."""


class Executable(ABC):
    """A graph compiled for one device."""

    @abstractmethod
    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        """Run on `inputs` (one per placeholder, in order) once `after` has happened.

        Returns the outputs, the event of completion and the chunks (may be empty). An input whose
        index is in `donate` may be overwritten and returned; the caller never reads it again.
        No output shares memory with an input that was not donated, unless the graph returns that
        placeholder itself, and then the output is that very `Buffer`.
        """


class Device(ABC):
    """An opened device."""

    info: DeviceInfo

    @abstractmethod
    def supports(self, node: torch.fx.Node) -> str | None:
        """None if the device can run this node, else the reason why not."""

    @abstractmethod
    def compile(self, graph: torch.fx.GraphModule) -> Executable:
        """Compile a graph in the canonical form of `hetpipe.sdk.graph`.

        Raises `UnsupportedOperatorError` for a node that `supports` refuses.
        """

    def compile_all(self, graphs: Sequence[torch.fx.GraphModule]) -> list[Executable]:
        """Compile several graphs, in their order; errors are those of `compile`.

        Override it where graphs that are compiled together take less time, or less memory.
        """
        return [self.compile(graph) for graph in graphs]

    def compile_ahead(self, graphs: Sequence[torch.fx.GraphModule]) -> None:  # noqa: B027
        """Begin with the graphs that will be compiled soon, while others are being traced.

        Called where `capabilities.compiles_ahead`. Override both where something is kept that makes
        the later `compile_all` quick, such as built programs; errors are those of `compile`.
        """

    @abstractmethod
    def upload(
        self,
        src: np.ndarray[Any, Any],
        dst: Buffer | None = None,
        after: Sequence[Event] = (),
    ) -> tuple[Buffer, Event]:
        """Copy a host array to the device, into `dst` if given.

        `src` may be reused by the caller after the event.
        """

    @abstractmethod
    def download(
        self, buf: Buffer, dst: np.ndarray[Any, Any], after: Sequence[Event] = ()
    ) -> Event:
        """Copy a buffer into a host array of the same shape and dtype."""

    def download_part(self, buf: Buffer, lo: int, hi: int, dst: np.ndarray[Any, Any]) -> Event:
        """Copy elements lo..hi of a buffer, in row-major order, into a flat host array.

        Called for chunks that are ready while the pass still computes the rest of the buffer. A
        device with `capabilities.chunks` must have it.
        """
        raise NotImplementedError(f"{self.info.id} has chunks, so it needs download_part")

    def fma_ceiling(self) -> tuple[Callable[[], None], int] | None:
        """(run, operations), or None: `run` does that number of float32 operations, and waits.

        Multiply-adds in registers alone: a ceiling for the rate of the device's matrix product.
        """
        return None

    def memory_used_nbytes(self) -> int | None:
        """Bytes that this process holds on the device, or None if it does not count."""
        return None

    def close(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Release the device."""


Finding = tuple[str, str, str]
"""(ok | repaired | missing | broken, text, the command that cures it)."""


class Backend(ABC):
    """A family of devices and how to reach them."""

    name: str

    @abstractmethod
    def discover(self) -> list[DeviceInfo]:
        """Devices present now. Raises `BackendError` with a cure if the driver is unusable."""

    @abstractmethod
    def open(self, info: DeviceInfo) -> Device:
        """Open a device that `discover` returned."""

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Decompositions to apply to graphs for these devices; default: down to core ATen."""
        from hetpipe.sdk.graph import core_decompositions

        return core_decompositions()

    def worker_environment(self, info: DeviceInfo, cores: int) -> dict[str, str]:
        """Environment variables to set before a worker process for this device starts."""
        return {}

    def describe(self) -> list[Finding]:
        """The findings that `hetpipe doctor` prints. Raises `BackendError`."""
        findings = [("ok", f"{i.id}: {i.name}, {i.driver}", "") for i in self.discover()]
        return findings or [("missing", f"backend {self.name} finds no device", "")]


class BlockingDevice(Device):
    """A device whose calls return when their work is done: write three plain methods.

    Keeps small backends tiny: events have already happened and there are no chunks.
    """

    @abstractmethod
    def _run(self, program: Any, inputs: list[Buffer], donate: frozenset[int]) -> list[Buffer]:
        """Run a result of `_compile`."""

    @abstractmethod
    def _compile(self, graph: torch.fx.GraphModule) -> Any:
        """Turn a graph into any object that `_run` understands."""

    @abstractmethod
    def _to_device(self, src: np.ndarray[Any, Any], dst: Buffer | None) -> Buffer:
        """Copy in."""

    @abstractmethod
    def _to_host(self, buf: Buffer, dst: np.ndarray[Any, Any]) -> None:
        """Copy out."""

    def compile(self, graph: torch.fx.GraphModule) -> Executable:
        from hetpipe.sdk.graph import require_support

        require_support(self, graph)
        return _BlockingExecutable(self, self._compile(graph), input_forms(graph))

    def upload(
        self,
        src: np.ndarray[Any, Any],
        dst: Buffer | None = None,
        after: Sequence[Event] = (),
    ) -> tuple[Buffer, Event]:
        for event in after:
            event.wait()
        return self._to_device(src, dst), DONE

    def download(
        self, buf: Buffer, dst: np.ndarray[Any, Any], after: Sequence[Event] = ()
    ) -> Event:
        for event in after:
            event.wait()
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
