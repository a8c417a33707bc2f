"""Broken backends: each is sound except for one fault that a driver might have.

`python tests/conformance/broken.py [FAULT]...` runs level core on each of them, or level training
if only that shows the fault, and prints the checks that fail.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from broken_groups import (
    EarlySums,
    FirstTensorOnly,
    OneFails,
    ReusedSums,
    ScaledSum,
    ScaleForgotten,
    UnroundedProduct,
)
from broken_windows import EarlyWrites, MappedCopy, ReusedWindows, RoundedOffsets, WholeBlocks
from sound import DONE, Array, SoundBackend, SoundBuffer, SoundDevice, SoundExecutable
from torch import fx

from hetpipe.conformance.check import Level
from hetpipe.conformance.run import Result, checks_of, rig_of, run_check
from hetpipe.sdk import (
    BackendError,
    Buffer,
    Capabilities,
    Chunk,
    Event,
    Executable,
    input_forms,
    operator_name,
    require_support,
)
from hetpipe.sdk.host import registry


class WrongStrides(SoundDevice):
    """A transposed tensor is read as if it were row-major."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if operator_name(node) == "aten.permute.default":
            return args[0].reshape(tuple(node.meta["val"].shape))
        return super().kernel(node, args, kwargs)


class StaleBuffers(SoundDevice):
    """Results are in memory of the executable, which the next run reuses."""

    def memory_for(self, executable: Any, nodes: Sequence[fx.Node]) -> list[Array]:
        if not hasattr(executable, "memory"):
            executable.memory = super().memory_for(executable, nodes)
        return list(executable.memory)


class RacyEvents(SoundDevice):
    """The event of a pass has happened before the work is done."""

    def submit(
        self, work: Callable[[], None], after: Sequence[Event], queue: int, held: Sequence[Buffer]
    ) -> Event:
        super().submit(work, after, queue, held)
        return DONE


class _Freed(SoundBuffer):
    def __del__(self) -> None:
        if self.array.dtype.kind == "f":
            self.array[...] = np.nan  # as if another tensor used the memory now


class FreedEarly(SoundDevice):
    """Memory is freed with the Buffer object, though queued work still reads it."""

    def buffer(self, array: Array) -> SoundBuffer:
        return _Freed(self, array)

    def submit(
        self, work: Callable[[], None], after: Sequence[Event], queue: int, held: Sequence[Buffer]
    ) -> Event:
        return super().submit(work, after, queue, ())


class OffByOne(SoundDevice):
    """A sum loses its last element if one element follows the last block of 32."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if operator_name(node) in ("aten.sum.dim_IntList", "aten.mean.dim") and args[1]:
            axis = args[1][0]
            length = args[0].shape[axis] if args[0].ndim else 0
            if length > 32 and length % 32 == 1:
                kept = np.take(args[0], range(length - 1), axis)
                return super().kernel(node, (kept, *args[1:]), kwargs)
        return super().kernel(node, args, kwargs)


class WrongGradient(SoundDevice):
    """The gradient of a convolution's weight is 0.1 % too large."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        result = super().kernel(node, args, kwargs)
        if operator_name(node) == "aten.convolution_backward.default" and result[1] is not None:
            return (result[0], result[1] * np.float32(1.001), *result[2:])
        return result


class WrongPadding(SoundDevice):
    """The gradient of a padded convolution's input is zero at the border."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        result = super().kernel(node, args, kwargs)
        is_backward = operator_name(node) == "aten.convolution_backward.default"
        if is_backward and any(args[5]) and result[0] is not None:
            border = result[0].copy()
            border[..., 0] = 0
            return (border, *result[1:])
        return result


class IgnoredDtype(SoundDevice):
    """Arithmetic of int64 is computed in float32."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        result = super().kernel(node, args, kwargs)
        if isinstance(result, np.ndarray) and result.dtype == np.int64:
            return result.astype(np.float32)
        return result


class Leaking(SoundDevice):
    """A list keeps all results for ever."""

    def memory_for(self, executable: SoundExecutable, nodes: Sequence[fx.Node]) -> list[Array]:
        memory = super().memory_for(executable, nodes)
        self.__dict__.setdefault("kept", []).extend(memory)
        return memory


class Chance(SoundDevice):
    """Products are summed in a random order."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if operator_name(node) == "aten.mm.default":
            order = np.random.default_rng().permutation(args[0].shape[1])
            return args[0][:, order] @ args[1][order]
        return super().kernel(node, args, kwargs)


class DonatedTooEarly(SoundDevice):
    """The first result overwrites a donated input before the others are computed."""

    def compile(self, graph: fx.GraphModule) -> Executable:
        require_support(self, graph)
        return _TooEarly(self, graph)


class _TooEarly(SoundExecutable):
    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        self.donated = {self.placeholders[i] for i in donate}
        outputs, event, chunks = super().run(inputs, donate, after, queue)
        event.wait()
        return outputs, event, chunks

    def compute(self, values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
        donated, calls = set(self.donated), self.calls
        for node in calls:
            self.calls = [node]
            super().compute(values)
            self.calls = calls
            if node in self.created:
                for place in list(donated):
                    if values[place].shape == values[node].shape:
                        values[place][...] = values[node]
                        donated.discard(place)
                        break
        return values


class Aliasing(SoundDevice):
    """A result that is a view of an input shares the input's memory."""

    def store(
        self, executable: SoundExecutable, values: dict[fx.Node, Array], results: Sequence[Array],
        donated: Mapping[fx.Node, Array],
    ) -> None:  # fmt: skip
        super().store(executable, values, results, donated)
        for node, buffer in zip(executable.created, self.last, strict=True):
            if values[node].base is not None and values[node].flags.c_contiguous:
                buffer.array = values[node]
        for array in donated.values():  # reuse the donated memory
            array[...] = -7

    def submit(
        self, work: Callable[[], None], after: Sequence[Event], queue: int, held: Sequence[Buffer]
    ) -> Event:
        event = super().submit(work, after, queue, held)
        event.wait()
        return event

    def memory_for(self, executable: SoundExecutable, nodes: Sequence[fx.Node]) -> list[Array]:
        self.last: list[SoundBuffer] = []
        return super().memory_for(executable, nodes)

    def buffer(self, array: Array) -> SoundBuffer:
        buffer = super().buffer(array)
        self.__dict__.setdefault("last", []).append(buffer)
        return buffer


class Unchecked(SoundDevice):
    """An index out of range reads whatever is in memory."""

    def check(self, node: fx.Node, values: Mapping[fx.Node, Array]) -> None:
        pass

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        try:
            return super().kernel(node, args, kwargs)
        except IndexError:
            return np.zeros(tuple(node.meta["val"].shape), np.float32)


class SharedScratch(SoundDevice):
    """Passes in two queues share the memory of intermediate results."""

    scratch: Array = np.empty(1 << 20, np.float32)

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        result = super().kernel(node, args, kwargs)
        if operator_name(node) == "aten.mm.default" and 0 < result.size <= self.scratch.size:
            room = self.scratch[: result.size].reshape(result.shape)
            room[...] = result
            time.sleep(1e-4)
            return room.copy()
        return result


class EarlyChunks(SoundDevice):
    """Chunks are reported as ready when the pass begins."""

    def chunks(self, outputs: Sequence[Buffer], end: Event) -> Sequence[Chunk]:
        size = int(np.prod(outputs[0].shape))
        return [(0, 0, size, DONE)] if size else ()


class SaysYes(SoundDevice):
    """`supports` accepts every operator, but compile does not."""

    def supports(self, node: fx.Node) -> str | None:
        return None

    def compile(self, graph: fx.GraphModule) -> Executable:
        for node in graph.graph.nodes:
            if node.op == "call_function" and super().supports(node):
                from hetpipe.sdk import UnsupportedOperatorError

                raise UnsupportedOperatorError(f"{self.info.id}: no {operator_name(node)}")
        return SoundExecutable(self, graph)


class Overwriting(SoundDevice):
    """Additions are computed in place, whether the input is donated or not."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        result = super().kernel(node, args, kwargs)
        is_input = getattr(node.args[0], "op", "") == "placeholder" if node.args else False
        if operator_name(node) == "aten.add.Tensor" and is_input and args[0].shape == result.shape:
            args[0][...] = result
        return result


class _Key:
    """The properties of a graph by which a cache finds its compiled program."""

    def __init__(self, constants: bool, dtypes: bool) -> None:
        self.constants, self.dtypes = constants, dtypes

    def of(self, graph: fx.GraphModule) -> tuple[Any, ...]:
        numbers = {node: number for number, node in enumerate(graph.graph.nodes)}
        return tuple(
            (
                operator_name(node) if node.op == "call_function" else node.op,
                [numbers[each] for each in node.all_input_nodes],
                repr(fx.map_arg((node.args, node.kwargs), lambda _: None)) if self.constants else 0,
                tuple(getattr(node.meta.get("val"), "shape", ())),
                str(getattr(node.meta.get("val"), "dtype", "")) if self.dtypes else "",
            )
            for node in graph.graph.nodes
        )


class ConstantsIgnored(SoundDevice):
    """The key of cached programs contains operators, shapes and dtypes but no constants."""

    key = _Key(constants=False, dtypes=True)

    def compile(self, graph: fx.GraphModule) -> Executable:
        kept = self.__dict__.setdefault("kept", {})
        return kept.setdefault(repr(self.key.of(graph)), super().compile(graph))


class DtypesIgnored(ConstantsIgnored):
    """The key of cached programs contains operators, shapes and constants but no dtypes."""

    key = _Key(constants=True, dtypes=False)

    def compile(self, graph: fx.GraphModule) -> Executable:
        executable = super().compile(graph)
        assert isinstance(executable, SoundExecutable)
        executable.forms = input_forms(graph)  # compare inputs with the latest graph
        return executable


class ScalarsKept(SoundDevice):
    """An input without dimensions is a launch argument that only the first run sets."""

    def compile(self, graph: fx.GraphModule) -> Executable:
        require_support(self, graph)
        return _ScalarsKept(self, graph)


class _ScalarsKept(SoundExecutable):
    def compute(self, values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
        kept = self.__dict__.setdefault("kept", {})
        for node in self.placeholders:
            if values[node].ndim == 0:
                values[node] = kept.setdefault(node, values[node].copy())
        return super().compute(values)


class _Never(Event):
    def done(self) -> bool:
        return False

    def wait(self, timeout_s: float | None = None) -> None:
        raise BackendError(f"not done after {timeout_s} s")  # at once, so that tests are quick


class NoCallsNoEvent(SoundDevice):
    """The event of a graph without calls waits for a launch that never comes."""

    def compile(self, graph: fx.GraphModule) -> Executable:
        require_support(self, graph)
        return _NoCallsNoEvent(self, graph)


class _NoCallsNoEvent(SoundExecutable):
    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        outputs, event, chunks = super().run(inputs, donate, after, queue)
        return outputs, event if self.calls else _Never(), chunks


class TailDropped(SoundDevice):
    """A product of more than 1100 terms adds whole blocks and drops the last part."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if operator_name(node) in ("aten.mm.default", "aten.bmm.default"):
            terms = args[0].shape[-1]
            if terms > 1100:
                kept = terms // 1100 * 1100
                return args[0][..., :kept] @ args[1][..., :kept, :]
        return super().kernel(node, args, kwargs)


def _rounded(array: Any) -> Any:
    """Round float32 arrays to mantissas of ten bits, as in TF32; return other values unchanged."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        return array
    bits = np.ascontiguousarray(array).view(np.int32)
    return ((bits + (1 << 12)) & ~np.int32((1 << 13) - 1)).view(np.float32)


class RoundedOperands(SoundDevice):
    """Products with at least 256 rows, columns and terms round their operands, as TF32 does."""

    operator = "aten.mm.default"

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if operator_name(node) == self.operator and self.is_wide(args):
            args = tuple(map(_rounded, args))
        return super().kernel(node, args, kwargs)

    def is_wide(self, args: Any) -> bool:
        return min(*args[0].shape[-2:], args[1].shape[-1]) >= 256


class RoundedBatches(RoundedOperands):
    """Batches of such products round their operands, as TF32 does."""

    operator = "aten.bmm.default"


class RoundedConvolutions(RoundedOperands):
    """Convolutions equivalent to such products round their operands, as TF32 does."""

    operator = "aten.convolution.default"

    def is_wide(self, args: Any) -> bool:
        x, weight = args[:2]
        pixels = x.shape[0] * np.prod(x.shape[2:])
        return bool(min(pixels, weight.shape[0], weight[0].size) >= 256)


class RoundedGradients(RoundedConvolutions):
    """Only the gradients of such convolutions round their operands."""

    operator = "aten.convolution_backward.default"

    def is_wide(self, args: Any) -> bool:
        return super().is_wide(args[1:])


class ShortIndices(SoundDevice):
    """A pointwise kernel counts elements in 16 bits, so it computes only the first 65,536."""

    most = 1 << 16

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        result = super().kernel(node, args, kwargs)
        if operator_name(node) in ("aten.mul.Tensor", "aten.add.Tensor"):
            array = np.ascontiguousarray(result)
            array.reshape(-1)[self.most :] = 0
            return array
        return result


class LaunchLimit(ShortIndices):
    """A pointwise kernel has at most 2^20 work-items, so later elements are not computed."""

    most = 1 << 20


FAST_NBYTES = 8 << 20


class SourceKept(SoundDevice):
    """Uploads above 8 MiB keep the source array instead of copying it."""

    def upload(self, src: Array) -> tuple[Buffer, Event]:
        if src.nbytes > FAST_NBYTES and src.flags.c_contiguous:
            return self.buffer(src), DONE
        return super().upload(src)


class EarlyDownload(SoundDevice):
    """The event of a download above 8 MiB has happened before the copy."""

    def download(self, buf: Buffer, dst: Array) -> Event:
        if buf.nbytes > FAST_NBYTES:
            self.copies.submit(lambda: time.sleep(0.1))  # the copy waits for this
        event = super().download(buf, dst)
        return DONE if buf.nbytes > FAST_NBYTES else event


class ShortCopy(SoundDevice):
    """A copy above 8 MiB ends too early."""

    def download(self, buf: Buffer, dst: Array) -> Event:
        if buf.nbytes <= FAST_NBYTES:
            return super().download(buf, dst)
        kept = buf.nbytes // FAST_NBYTES * FAST_NBYTES // 4
        array = self.own(buf).array
        return self.copies.submit(
            lambda: np.copyto(dst.reshape(-1)[:kept], array.reshape(-1)[:kept])
        )


class FailureIgnored(SoundDevice):
    """A run begins after the events in `after` have ended, even if they failed."""

    def submit(
        self, work: Callable[[], None], after: Sequence[Event], queue: int, held: Sequence[Buffer]
    ) -> Event:
        def anyway() -> None:
            for event in after:
                with contextlib.suppress(BackendError):
                    event.wait()
            work()

        return super().submit(anyway, (), queue, held)


class FlushesDenormals(SoundDevice):
    """Results below the smallest normal number become zero."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        result = super().kernel(node, args, kwargs)
        if isinstance(result, np.ndarray) and result.dtype == np.float32:
            return np.where(np.abs(result) < np.finfo(np.float32).tiny, np.float32(0), result)
        return result


class _LeaksPerRun(SoundDevice):
    def leak(self, event: Event) -> object:
        raise NotImplementedError

    def submit(
        self, work: Callable[[], None], after: Sequence[Event], queue: int, held: Sequence[Buffer]
    ) -> Event:
        event = super().submit(work, after, queue, held)
        self.__dict__.setdefault("left", []).append(self.leak(event))
        return event


class LeaksDescriptors(_LeaksPerRun):
    """Each run opens a file descriptor that is never closed."""

    def leak(self, event: Event) -> object:
        return _Descriptor()


class _Descriptor:
    def __init__(self) -> None:
        self.number = os.open(os.devnull, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.number)


class LeaksThreads(_LeaksPerRun):
    """Each run starts a thread that waits until the device is deleted."""

    def leak(self, event: Event) -> object:
        if not hasattr(self, "end"):
            self.end = threading.Event()
            weakref.finalize(self, self.end.set)
        thread = threading.Thread(target=self.end.wait, daemon=True)
        thread.start()
        return thread


class LeaksEvents(_LeaksPerRun):
    """A list keeps the events of all runs."""

    def leak(self, event: Event) -> object:
        return event


class _Counted(SoundBuffer):
    """A buffer whose bytes are counted while it exists."""

    def __init__(self, device: SoundDevice, array: Array) -> None:
        super().__init__(device, array)
        counts = device.__dict__.setdefault("counts", [0])
        counts[0] += self.nbytes
        weakref.finalize(self, _less, counts, self.nbytes)


def _less(counts: list[int], nbytes: int) -> None:
    counts[0] -= nbytes


class CountsPages(SoundDevice):
    """The memory counter counts bytes but reports them as blocks of 512 bytes."""

    factor = 512

    def buffer(self, array: Array) -> SoundBuffer:
        return _Counted(self, array)

    def memory_used_nbytes(self) -> int | None:
        counts: list[int] = self.__dict__.setdefault("counts", [0])
        return counts[0] * self.factor


class CountsElements(CountsPages):
    """The memory counter counts elements, a quarter of the bytes."""

    factor = 1

    def memory_used_nbytes(self) -> int | None:
        counted = super().memory_used_nbytes()
        return None if counted is None else counted // 4


class FreeBytesAlone(CountsPages):
    """The available bytes lack the bytes that this process holds."""

    factor = 1

    def memory_available_nbytes(self) -> int | None:
        return self.info.memory_nbytes - (self.memory_used_nbytes() or 0)


class FreesLater(CountsPages):
    """Memory is freed some time after its buffer; no fault, since the counter becomes right."""

    factor = 1

    def buffer(self, array: Array) -> SoundBuffer:
        return _FreedLater(self, array)


class _FreedLater(SoundBuffer):
    def __init__(self, device: SoundDevice, array: Array) -> None:
        super().__init__(device, array)
        counts = device.__dict__.setdefault("counts", [0])
        counts[0] += self.nbytes
        weakref.finalize(
            self, lambda n: threading.Timer(0.3, _less, (counts, n)).start(), self.nbytes
        )


class ManyInputsOverwritten(SoundDevice):
    """A graph with more than four inputs stores its first sum in the memory of an input."""

    def store(
        self, executable: SoundExecutable, values: dict[fx.Node, Array], results: Sequence[Array],
        donated: Mapping[fx.Node, Array],
    ) -> None:  # fmt: skip
        super().store(executable, values, results, donated)
        last = executable.placeholders[-1]
        if len(executable.placeholders) > 4 and executable.created:
            first = values[executable.created[0]]
            if first.shape == values[last].shape:
                values[last][...] = first


class _Cyclic(SoundBuffer):
    def __init__(self, device: SoundDevice, array: Array) -> None:
        super().__init__(device, array)
        self.itself = self


class ReferenceCycle(SoundDevice):
    """A buffer refers to itself, so its memory waits for Python's garbage collector."""

    def buffer(self, array: Array) -> SoundBuffer:
        return _Cyclic(self, array)


@dataclass(frozen=True)
class Fault:
    """A broken device, the check that must fail, and words of the failure that name the fault."""

    device: type[SoundDevice]
    check: str
    words: str
    capabilities: Capabilities = field(default_factory=Capabilities)


FAULTS = {
    fault.device.__name__: fault
    for fault in (
        Fault(WrongStrides, "strides/transposed", "wrong stride handling"),
        Fault(StaleBuffers, "memory/results last", "a stale buffer"),
        Fault(RacyEvents, "events/after the work", "a racy event, which happens before the work"),
        Fault(
            FreedEarly, "memory/dropped while queued", "memory that is freed with the Buffer object"
        ),
        Fault(OffByOne, "lengths/sum", "an off-by-one reduction"),
        Fault(WrongGradient, "operators/conv", "of its gradient"),
        Fault(WrongPadding, "operators/conv_pad_stride", "of its gradient: boundaries, padding"),
        Fault(IgnoredDtype, "dtypes/int64", "a kernel that ignores the dtype"),
        Fault(Leaking, "memory/no leaks", "a leak: memory"),
        Fault(Chance, "determinism/run to run", "a sum in random order"),
        Fault(DonatedTooEarly, "memory/donation", "a donated input that is read later"),
        Fault(Aliasing, "memory/results of their own", "a result that aliases an input"),
        Fault(Unchecked, "values/index out of range", "an index that the device does not check"),
        Fault(SharedScratch, "queues/passes at once", "share scratch memory", Capabilities(2)),
        Fault(
            EarlyChunks, "chunks/parts of results", "reported too early", Capabilities(chunks=True)
        ),
        Fault(SaysYes, "contract/refusals", "`supports` and compile disagree"),
        Fault(Overwriting, "memory/inputs last", "overwritten in place"),
        Fault(ConstantsIgnored, "contract/programs apart", "whose key lacks the constants"),
        Fault(DtypesIgnored, "contract/programs apart", "or the dtypes"),
        Fault(ScalarsKept, "memory/scalars", "kept from the first run"),
        Fault(NoCallsNoEvent, "events/no operators", "work that never began"),
        Fault(TailDropped, "lengths/long product", "drops the last part of K"),
        Fault(RoundedOperands, "lengths/wide product", "TF32"),
        Fault(RoundedBatches, "lengths/wide product", "TF32"),
        Fault(RoundedConvolutions, "lengths/wide convolution", "TF32"),
        Fault(RoundedGradients, "lengths/wide convolution", "TF32"),
        Fault(ShortIndices, "lengths/many elements", "beyond 65,535"),
        Fault(LaunchLimit, "lengths/many elements", "2^20 elements"),
        Fault(SourceKept, "buffers/large copies", "reads its source after its event"),
        Fault(EarlyDownload, "buffers/large copies", "whose event happens early"),
        Fault(ShortCopy, "buffers/large copies", "as soon as done() is true"),
        Fault(FailureIgnored, "events/failed before", "the device ignores an error in `after`"),
        Fault(FlushesDenormals, "values/denormals", "declare capabilities.flushes_denormals"),
        Fault(LeaksDescriptors, "memory/nothing kept per run", "file descriptors more"),
        Fault(LeaksThreads, "memory/nothing kept per run", "threads more"),
        Fault(LeaksEvents, "memory/nothing kept per run", "events more"),
        Fault(CountsPages, "memory/counter", "instead of bytes"),
        Fault(CountsElements, "memory/counter", "instead of bytes"),
        Fault(FreeBytesAlone, "memory/available", "unavailable to the process itself"),
        Fault(ManyInputsOverwritten, "memory/inputs last", "input 5 of 6"),
        Fault(ReferenceCycle, "memory/no leaks", "a reference cycle of _Cyclic"),
        Fault(MappedCopy, "windows/bits", "float32[] at byte 0: element [] is 0,"),
        Fault(RoundedOffsets, "windows/bits", "float32[] at byte 0: element [] is -0.6517"),
        Fault(WholeBlocks, "windows/other offsets", "float32[1] at byte 64: element [0] is 0,"),
        Fault(EarlyWrites, "windows/events", "float32[2097152] at byte 0: element"),
        Fault(ReusedWindows, "windows/ends", "between the drop of a window and a write to it"),
        Fault(FirstTensorOnly, "groups/sums", "sum 3 of 45, float32[3, 5]: element"),
        Fault(ScaleForgotten, "groups/scale", "sum 1 of 45, float32[]: element [] is"),
        Fault(ScaledSum, "groups/scale", "sum 1 of 45, float32[]: element [] is"),
        Fault(UnroundedProduct, "groups/same bits", "have other bits in the other process"),
        Fault(OneFails, "groups/sums", "in the other process, sum: BackendError: no memory"),
        Fault(EarlySums, "groups/events", "sum 1 of 1, float32[2097152]: element"),
        Fault(ReusedSums, "groups/several sums", "sum 1 of 3, float32[3, 5]: element"),
    )
}


def backend_of(fault: Fault) -> type[SoundBackend]:
    """Return a backend with the broken device, registered as `broken`."""
    fields = {
        "name": "broken",
        "device": fault.device,
        "capabilities": fault.capabilities,
        "__module__": __name__,
    }
    registry._registered.pop("broken", None)
    registry._instances.pop("broken", None)
    name = f"Broken{fault.device.__name__}"
    return registry.register_backend(type(name, (SoundBackend,), fields))  # type: ignore[return-value]


def __getattr__(name: str) -> type[SoundBackend]:
    """Return the class of `backend_of`, which another process loads by its name."""
    fault = FAULTS.get(name.removeprefix("Broken"))
    if fault is None:
        raise AttributeError(name)
    return backend_of(fault)


def results_of(fault: Fault, names: Sequence[str] = (), level: Level = Level.CORE) -> list[Result]:
    """Return the results of a level's checks, or of the named checks, on a broken device."""
    backend_of(fault)
    rig = rig_of("broken:unit:0")
    checks = [each for each in checks_of(level) if not names or each.name in names]
    return [run_check(each, rig) for each in checks]


def main(names: Sequence[str]) -> None:
    for name in names or FAULTS:
        fault = FAULTS[name]
        level = Level.TRAINING if fault.check.startswith("operators/") else Level.CORE
        failed = [result for result in results_of(fault, (), level) if result.failed]
        own = [result for result in failed if result.name == fault.check]
        print(f"{name}: {len(failed)} checks of level {level.name.lower()} fail")
        for result in own or failed[:1]:
            print(f"  {result.name}: {result.text}")
        if not own:
            print(f"  NOT by {fault.check}")


if __name__ == "__main__":
    main(sys.argv[1:])
