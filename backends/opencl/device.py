"""An opened OpenCL device: its queues, memory pool and built programs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import fx

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import DONE, Buffer, Event, Executable
from hetpipe.sdk.graph import graph_rows
from hetpipe.sdk.info import HOST_MEMORY, DeviceInfo
from hetpipe.sdk.support import require_support

from .bundle.export import exported, job_of
from .bundle.programs import BundledPrograms
from .lower.lowering import Lowered, lower
from .lower.registry import Lowering, refusal
from .lower.target import Target
from .platform.driver import driver, errors, quiet
from .platform.families import Options
from .platform.runtimes import Runtime, spins
from .platform.tuning import cache_nbytes, tuning_of
from .platform.vendors import free_nbytes
from .run.events import CommandEvent, DownloadEvent
from .run.executable import OpenCLExecutable
from .run.memory import (
    GRANULE_NBYTES,
    Bytes,
    MemoryPool,
    OpenCLBuffer,
    PassQueue,
    computes_in_host,
)
from .run.opened import OpenedDevice
from .run.programs import Binaries, Programs, facts_of
from .run.second_compiler import SecondCompiler
from .run.specialise import specialise
from .run.staging import Pinned, Staging

if TYPE_CHECKING:
    from hetpipe.sdk.formats.bundle import Exported, ProgramEntry, SourceEntry


class OpenCLDevice(OpenedDevice):
    """A device with in-order queues for passes and a separate queue for transfers.

    A queue gets no memory that another queue still uses.
    """

    def __init__(
        self,
        info: DeviceInfo,
        cl_device: Any,
        runtime: Runtime | None,
        lowerings: Mapping[str, Lowering],
        bundles: Path | None = None,
        family: str = "cpu",
        channels: bool = False,
    ) -> None:
        """With a folder `bundles`, the device loads the bundles' binaries and compiles nothing."""
        cl = driver()
        self.info = info
        self._cl_device = cl_device
        self._lowerings = lowerings
        self.retired: deque[Any] = deque()
        self.drains = runtime is not None and runtime.drains
        self.spins = spins(cl_device.platform.name)
        self.target = Target(
            info,
            max_work_group_size=cl_device.max_work_group_size,
            compute_units=cl_device.max_compute_units,
            local_memory_nbytes=cl_device.local_mem_size,
            alignment_nbytes=max(GRANULE_NBYTES, cl_device.mem_base_addr_align // 8),
            extensions=frozenset(cl_device.extensions.split()),
            tuning=tuning_of(cl_device, runtime),
            last_cache_nbytes=cache_nbytes(3),
            channels=channels,
            family=family,
        )
        self.dataflow_limit_s = Options.dataflow_limit_s
        with errors(info.id, "opening it"):
            self.context = cl.Context([cl_device])
            queues = range(info.capabilities.queues)
            self.pass_queues = tuple(PassQueue(self.context) for _ in queues)
            self.queue = self.pass_queues[0].cl
            self._transfers = cl.CommandQueue(self.context)
            # Share no host memory with an interpreter of kernels: it must see all accesses.
            shared = (
                info.on_cores
                and not self.target.checks_memory
                and computes_in_host(self.context, self._transfers)
            )
        host_queue = self._transfers if shared else None
        self.memory = MemoryPool(
            self.context, info.id, host_queue, lambda: tuple(q.last for q in self.pass_queues),
            cl_device.max_mem_alloc_size,
        )  # fmt: skip
        # A device with separate memory copies through pinned memory.
        apart = info.memory_domain != HOST_MEMORY and not info.on_cores
        self.staging = Staging(self.context, info.id, self._transfers) if apart else None
        self._late = runtime is not None and runtime.late
        self.programs = self._programs(bundles, runtime is not None and runtime.forgets)
        self._ahead: dict[str, Lowered] = {}
        """The launches from the last `compile_ahead`, by the text of the graph."""
        self._held: deque[tuple[Any, tuple[Any, ...]]] = deque()
        self.lock = threading.RLock()
        self.enqueueing = threading.Lock()

    def _programs(self, bundles: Path | None, forgets: bool) -> Programs | BundledPrograms:
        """Return the built programs: from bundles, or from the runtime's compiler."""
        own = (self._cl_device, self.info.id)
        if bundles is not None:
            return BundledPrograms(self.context, *own, self.binary_facts(), bundles)
        binaries = Binaries(*own) if forgets else None
        second = SecondCompiler(self.context, *own) if self._late else None
        return Programs(self.context, self.info.id, binaries, second)

    def supports(self, node: fx.Node) -> str | None:
        return refusal(self.info, self._lowerings, node)

    def compile(self, graph: fx.GraphModule) -> Executable:
        return self.compile_all([graph])[0]

    def compile_all(self, graphs: Sequence[fx.GraphModule]) -> list[Executable]:
        """Compile graphs; new kernels share programs, because each build has a fixed cost."""
        return [OpenCLExecutable(self, each) for each in self._lowered(graphs)]

    def compile_ahead(self, graphs: Sequence[fx.GraphModule]) -> None:
        """Build the programs, and keep the launches for the next `compile_all` of equal graphs."""
        lowered = self._lowered(graphs)
        self._ahead = dict(zip(map(_text_of, graphs), lowered, strict=True))

    def export(self, programs: Mapping[str, fx.GraphModule]) -> Exported:
        return exported({name: self._lower(graph) for name, graph in programs.items()})

    def build(self, source: SourceEntry, text: str, programs: Sequence[ProgramEntry]) -> bytes:
        """Compile a source of a bundle, and return the binary. If the runtime compiles kernels
        only at a launch, launch them here as in `programs`, so that the binary has their code."""
        cl = driver()
        job = job_of(text, source.options, programs if self._late else ())
        with quiet(), errors(self.info.id, f"compiling {source.file} of a bundle"):
            program = specialise(cl, cl.CommandQueue(self.context), job)
            (binary,) = program.get_info(cl.program_info.BINARIES)
        return bytes(binary)

    def binary_facts(self) -> Mapping[str, str]:
        return facts_of(self._cl_device, self.info.on_cores)

    def upload(self, src: np.ndarray[Any, Any]) -> tuple[Buffer, Event]:
        host = np.ascontiguousarray(src)
        memory = self.memory.take(host.nbytes)
        buffer = OpenCLBuffer(self, src.shape, str(src.dtype), memory)
        if host.nbytes == 0:
            return buffer, DONE
        source = host.reshape(-1).view(np.uint8)
        if (room := memory.host) is not None:
            return buffer, self._copy(room[: host.nbytes], source)
        if (pinned := self._pinned(host.nbytes)) is not None:
            staged = pinned.bytes(host.nbytes)
            np.copyto(staged, source)
            return buffer, self._transfer((buffer, pinned), memory.cl, staged)
        return buffer, self._transfer((buffer,), memory.cl, source)

    def download(self, buf: Buffer, dst: np.ndarray[Any, Any]) -> Event:
        buffer = self._mine(buf)
        if buf.shape != dst.shape or buf.dtype != str(dst.dtype):
            raise BackendError(
                f"cannot download: the buffer is {buf.dtype}{list(buf.shape)}, "
                f"the array {dst.dtype}{list(dst.shape)}"
            )
        if not (dst.flags.c_contiguous and dst.flags.writeable):
            raise BackendError("download needs a writable C-contiguous array to copy into")
        if dst.nbytes == 0:
            return DONE
        target = dst.reshape(-1).view(np.uint8)
        if (room := buffer.memory.host) is not None:
            return self._copy(target, room[: dst.nbytes])
        return self._fetch(buffer, target)

    def download_part(self, buf: Buffer, lo: int, hi: int, dst: np.ndarray[Any, Any]) -> Event:
        buffer, target = self._mine(buf), dst.view(np.uint8)
        begin = lo * dst.itemsize
        if (room := buffer.memory.host) is not None:
            return self._copy(target, room[begin : begin + target.nbytes])
        return self._fetch(buffer, target, src_offset=begin)

    def memory_used_nbytes(self) -> int | None:
        return self.memory.held_nbytes + sum(queue.arena_nbytes for queue in self.pass_queues)

    def memory_available_nbytes(self) -> int | None:
        free = None if self.info.on_cores else free_nbytes(self._cl_device)
        return None if free is None else free + (self.memory_used_nbytes() or 0)

    def trim(self) -> None:
        with self.lock:
            self._collect()
        self._free_unused()

    def close(self) -> None:
        """Wait for all work, then free the caches; do nothing if kernels hang."""
        if self.stuck:
            return
        with errors(self.info.id, "closing it"):
            for queue in self.pass_queues:
                queue.cl.finish()
            self._transfers.finish()
        self._collect()
        self._free_unused()
        self.retired.clear()

    def _free_unused(self) -> None:
        self.memory.trim()
        if self.staging is not None:
            self.staging.trim()

    def _lowered(self, graphs: Sequence[fx.GraphModule]) -> list[Lowered]:
        lowered = list(map(self._lower, graphs))
        launches = [launch for each in lowered for launch in each.launches]
        self.programs.prepare((launch.kernel for launch in launches), launches)
        return lowered

    def _lower(self, graph: fx.GraphModule) -> Lowered:
        require_support(self, graph)
        ahead = self._ahead.pop(_text_of(graph), None) if self._ahead else None
        return lower(graph, self.target, self._lowerings) if ahead is None else ahead

    def _copy(self, dst: Bytes, src: Bytes) -> Event:
        """Copy without the driver, which would first wait for all running kernels."""
        np.copyto(dst, src)
        return DONE

    def _pinned(self, nbytes: int) -> Pinned | None:
        return None if self.staging is None else self.staging.take(nbytes)

    def _fetch(self, buffer: OpenCLBuffer, target: Bytes, **where: int) -> Event:
        """Start a copy from a buffer to the host."""
        if (pinned := self._pinned(target.nbytes)) is None:
            return self._transfer((buffer,), target, buffer.memory.cl, **where)
        staged = pinned.bytes(target.nbytes)
        command = self._enqueue_copy((buffer, pinned), staged, buffer.memory.cl, **where)
        return DownloadEvent(self, command, pinned, target)

    def _transfer(self, kept: tuple[Any, ...], dst: Any, src: Any, **where: int) -> Event:
        return CommandEvent(self, self._enqueue_copy(kept, dst, src, **where), "copying")

    def _enqueue_copy(self, kept: tuple[Any, ...], dst: Any, src: Any, **where: int) -> Any:
        """Start a copy; keep `kept` and both ends until it has ended."""
        cl = driver()
        with self.lock, errors(self.info.id, "copying"):
            self._collect()
            command = cl.enqueue_copy(self._transfers, dst, src, is_blocking=False, **where)
            self._transfers.flush()
            self._held.append((command, (*kept, src, dst)))
        return command

    def _collect(self) -> None:
        """Release the memory of finished transfers."""
        complete = driver().command_execution_status.COMPLETE
        while self._held and self._held[0][0].command_execution_status <= complete:
            self._held.popleft()

    def _mine(self, buf: Buffer) -> OpenCLBuffer:
        if not isinstance(buf, OpenCLBuffer) or buf.device is not self:
            raise BackendError(f"cannot download: the buffer is not on {self.info.id}")
        return buf


def _text_of(graph: fx.GraphModule) -> str:
    """Return the text of a graph, with all properties that lowering reads."""
    together = graph.graph.output_node().meta.get("together", frozenset())
    return repr((graph_rows(graph), sorted(together)))
