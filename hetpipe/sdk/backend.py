"""The backend contract, which hardware makers implement; `API_VERSION` counts its changes.

A backend finds devices and opens them. A device compiles graphs and moves tensors. An executable
runs a compiled graph. Host tensors are C-contiguous numpy arrays; every input and output of a graph
is row-major.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.info import DTYPE_NBYTES, DeviceInfo

if TYPE_CHECKING:
    import torch

    from hetpipe.sdk.formats.bundle import Exported, ProgramEntry, SourceEntry
    from hetpipe.sdk.kernels import KernelRunner, UserKernel


class Event(ABC):
    """The end of work on a device. Several threads may call its methods at the same time.

    `hetpipe.sdk.events` has ready-made event classes.
    """

    @abstractmethod
    def done(self) -> bool:
        """Return whether the work has ended. Raises the device's error if the work failed."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the work ends. Raises `BackendError` on failure or after `timeout_s`."""


class DoneEvent(Event):
    """An event that has already happened."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        return


DONE = DoneEvent()


class Buffer(ABC):
    """A row-major tensor in a device's memory. Immutable unless donated.

    The device may free the memory when nobody holds the object *and* all work on it has ended:
    hetpipe drops buffers while passes that read them are still queued.
    """

    device: Device
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_NBYTES[self.dtype]


Chunk = tuple[int, int, int, Event]
"""(output, lo, hi, event): elements lo to hi - 1 of the output, in row-major order, are ready when
the event happens."""


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
        """Run on `inputs` (one per placeholder, in order) once all events in `after` have happened.

        Returns the outputs, the event of completion and the chunks (may be empty). The call may
        return at once, or block until the work is done. An input whose index is in `donate` may be
        overwritten and returned; the caller never reads it again. Outputs of different nodes or
        runs share no memory. An output shares no memory with an input that was not donated, with
        one exception: for a placeholder that the graph returns, the output is the input's `Buffer`.
        Only one thread at a time calls an executable, but not always the same thread. `queue` is a
        number below `capabilities.queues`.

        Raises `BackendError` for inputs of wrong shapes, dtypes or devices. If work fails later,
        its event raises the error.
        """


class Window(ABC):
    """Memory of a device that another process of this host can write: messages arrive in it.

    Offsets are multiples of 64 bytes. The memory stays as long as the object, in both processes.
    """

    @abstractmethod
    def write(self, src: Buffer, offset: int) -> Event:
        """Start to copy a tensor to byte `offset` of the window. The tensor is computed."""

    @abstractmethod
    def read(self, offset: int, shape: tuple[int, ...], dtype: str) -> tuple[Buffer, Event]:
        """Start to copy a tensor from byte `offset` of the window into a new buffer."""


class Group(ABC):
    """Devices of one backend, each in a separate process of this host, that sum tensors."""

    @abstractmethod
    def sum(self, terms: Sequence[Buffer], scale: float) -> tuple[list[Buffer], Event]:
        """Start to multiply this device's terms by `scale`, and to sum each over the devices.

        All devices of the group call it with terms of the same shapes and dtypes, in the same order
        of calls, and get the same bits. The terms are computed; they may be overwritten and
        returned, and the caller never reads them again.
        """


class Device(ABC):
    """An opened device. Methods may be called from any thread, and at the same time."""

    info: DeviceInfo

    @abstractmethod
    def supports(self, node: torch.fx.Node) -> str | None:
        """Return None if the device can run this node, else the reason why not.

        The answer depends on the node alone: its operator, its arguments, and shapes and dtypes in
        `meta["val"]`. Planning calls this thousands of times, so a call must take microseconds.
        """

    @abstractmethod
    def compile(self, graph: torch.fx.GraphModule) -> Executable:
        """Compile a graph in the canonical form of `hetpipe.sdk.graph`. This may take long.

        Raises `UnsupportedOperatorError` for a node that `supports` refuses, and for no other node.
        """

    def compile_all(self, graphs: Sequence[torch.fx.GraphModule]) -> list[Executable]:
        """Compile several graphs, in their order. Raises like `compile`.

        Override it if graphs that are compiled together take less time or memory.
        """
        return [self.compile(graph) for graph in graphs]

    def compile_ahead(self, graphs: Sequence[torch.fx.GraphModule]) -> None:  # noqa: B027
        """Start work on graphs that will be compiled soon, while other graphs are being traced.

        Called if `capabilities.compiles_ahead` is true. Override it if the device can keep results,
        such as built programs, that make the later `compile_all` quick. Raises like `compile`.
        """

    def export(self, programs: Mapping[str, torch.fx.GraphModule]) -> Exported:
        """Return the kernels of the named graphs `programs` as sources for an offline compiler.

        Called, like `build`, if `capabilities.exports` is true. It compiles nothing, and raises
        like `compile`. For a board that holds only one binary at a time, return only one source.
        """
        raise BackendError(f"{self.info.id} exports no kernels: its backend lacks `export`")

    def build(self, source: SourceEntry, text: str, programs: Sequence[ProgramEntry]) -> bytes:
        """Compile an exported source with the device's driver, and return the binary.

        For devices whose driver can do the work of an offline compiler. Raises `BackendError`.
        """
        raise BackendError(f"{self.info.id} compiles no bundles: its backend lacks `build`")

    def binary_facts(self) -> Mapping[str, str]:
        """Return the facts that a binary depends on, by name, such as the driver's version."""
        return {"driver": self.info.driver}

    @abstractmethod
    def upload(self, src: np.ndarray[Any, Any]) -> tuple[Buffer, Event]:
        """Copy a host array of any shape and strides to a new buffer on the device.

        The caller keeps `src` alive and unchanged until the event happens, and may then reuse it.
        Raises `BackendError` if the device lacks memory; the device must still work afterwards.
        """

    @abstractmethod
    def download(self, buf: Buffer, dst: np.ndarray[Any, Any]) -> Event:
        """Copy a buffer into a C-contiguous host array of the same shape and dtype.

        All work that writes `buf` has ended before the call. The event happens when `dst` is
        filled; the caller keeps `buf` and `dst` until then.
        """

    def download_part(self, buf: Buffer, lo: int, hi: int, dst: np.ndarray[Any, Any]) -> Event:
        """Copy elements lo to hi - 1 of a buffer, in row-major order, into a flat host array.

        Called for ready chunks, while the pass still computes the rest of the buffer. A device
        with `capabilities.chunks` must override it.
        """
        raise BackendError(f"{self.info.id} declares chunks, so it needs download_part")

    def pin(self, memory: np.ndarray[Any, Any]) -> Callable[[], None]:
        """Prepare host memory (flat, bytes) for many copies; return a function that ends this.

        Called for memory that processes share. Override it if copies from and to prepared memory
        are faster. All copies have ended before the returned function is called.
        """
        return lambda: None

    def open_window(self, nbytes: int) -> tuple[Window, bytes] | None:
        """Return a window of `nbytes` in this device's memory, and a handle for `map_window`.

        Raises `BackendError` if the device cannot; messages then pass through the host. They also
        do with None, the default.
        """
        return None

    def map_window(self, handle: bytes, nbytes: int) -> Window:
        """Return the window of a device of the same backend, which another process has opened.

        Raises `BackendError` if the device cannot reach it; messages then pass through the host.
        """
        raise BackendError(f"{self.info.id} cannot write to other devices")

    def join_group(self, folder: Path, rank: int, size: int) -> Group | None:
        """Return a group of `size` devices, this one with number `rank`, once all have joined.

        The devices are of one backend and one host, and have separate memories. `folder` is empty
        at first; only devices of the group use it. Raises `BackendError` if they cannot sum. If all
        devices of the group return None, the default, the host sums.
        """
        return None

    def fma_ceiling(self) -> tuple[Callable[[], None], int] | None:
        """Return (run, operations), or None if the device cannot measure its rate of multiply-adds.

        `run` does float32 multiply-adds that read only registers, and waits for their end;
        `operations` counts two for each. Their rate limits the device's matrix products.
        """
        return None

    def launch_floor(self) -> tuple[Callable[[], None], int] | None:
        """Return (run, launches), or None if the device cannot measure the time of a launch.

        `run` launches an empty kernel `launches` times and waits for the end. No launch of another
        kernel takes less time.
        """
        return None

    def memory_used_nbytes(self) -> int | None:
        """Return the bytes that this process holds on the device; None if it does not count them.

        The report of a training shows the largest of these numbers, to reveal leaks.
        """
        return None

    def memory_available_nbytes(self) -> int | None:
        """Return the bytes that tensors of this process can take on the device now.

        These are the free bytes and the bytes that this process holds, less a reserve for the
        driver. Plans take no more. With None, the default, plans take up to `info.memory_nbytes`.
        """
        return None

    def trim(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Free unused memory that the device keeps for later tensors.

        Called after a profile and before new stages, whose tensors have other sizes. Another
        process may then use the memory.
        """

    def close(self) -> None:  # noqa: B027 - nothing to do is a fine default
        """Wait for all work, and release the device. Nobody uses the device afterwards."""


Finding = tuple[str, str, str]
"""(ok | repaired | missing | broken, text, command that cures the problem)."""


class Backend(ABC):
    """A family of devices: finds them and opens them."""

    name: str
    """The first part of its devices' ids: lower-case letters, digits, - and _; a letter first."""
    api_version: int = 1
    """The version of this contract that the backend was written for: a literal number."""
    lends: str = ""
    """The name of the backend, or the id of the device, that runs the operators that this backend's
    devices refuse; empty for none. Tensors are copied between the two devices through the host's
    memory. Plans and `hetpipe coverage` name these operators."""
    discover_limit_s: float = 20.0
    """Most seconds for `discover`; a slower backend is disabled, and a message names it."""
    open_limit_s: float = 120.0
    """Most seconds for `open`, which may load a bitstream."""

    @abstractmethod
    def discover(self) -> list[DeviceInfo]:
        """Return the devices that are present now, the best device first. Open none.

        Raises `BackendError` with a cure if the driver is unusable.
        """

    @abstractmethod
    def open(self, info: DeviceInfo) -> Device:
        """Open a device that `discover` returned. A process may open it several times."""

    def configure(self, options: Mapping[str, Any], folder: Path) -> None:
        """Apply the table `[backend.NAME]` of a cluster file; it replaces an earlier table.

        Called before `discover`, in the controller and in every worker of the backend. Relative
        paths start at `folder`. Raises `BackendError` for unknown options.
        """
        raise BackendError(f"backend {self.name!r} takes no options; it got {', '.join(options)}")

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Return the decompositions for graphs on its devices; default: `core_decompositions()`.

        hetpipe keeps the result until the next call of `configure`.
        """
        from hetpipe.sdk.graph import core_decompositions

        return core_decompositions()

    def kernel_runner(self) -> KernelRunner | None:
        """Return a runner of single kernels, for `hetpipe kernels`; default: none."""
        return None

    def user_kernels(self) -> Sequence[UserKernel]:
        """Return the user's kernels that the backend's devices run; default: none.

        Plans and `hetpipe devices` name these kernels.
        """
        return ()

    def worker_environment(self, info: DeviceInfo, cores: int) -> dict[str, str]:
        """Return environment variables for a worker process of this device, with `cores` cores."""
        return {}

    def describe(self) -> list[Finding]:
        """Return the findings that `hetpipe doctor` prints. Raises `BackendError`."""
        findings = [("ok", f"{i.id}: {i.name}, {i.driver}", "") for i in self.discover()]
        return findings or [("missing", f"backend {self.name} finds no device", "")]
