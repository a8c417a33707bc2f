"""Broken backends: each is sound but for one fault, as a driver might have it.

`python tests/conformance/broken.py [FAULT]...` runs level core, or training where the fault shows
only there, on each of them, and prints the checks that fail.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sound import DONE, Array, SoundBackend, SoundBuffer, SoundDevice, SoundExecutable
from torch import fx

from hetpipe.conformance.check import Level
from hetpipe.conformance.run import Result, checks_of, rig_of, run_check
from hetpipe.sdk import (
    Buffer,
    Capabilities,
    Chunk,
    Event,
    Executable,
    operator_name,
    registry,
    require_support,
)


class WrongStrides(SoundDevice):
    """A transposed tensor is read as if it were row-major."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if operator_name(node) == "aten.permute.default":
            return args[0].reshape(tuple(node.meta["val"].shape))
        return super().kernel(node, args, kwargs)


class StaleBuffers(SoundDevice):
    """Results lie in memory of the executable, which the next run reuses."""

    def memory_for(self, executable: Any, nodes: Sequence[fx.Node]) -> list[Array]:
        if not hasattr(executable, "memory"):
            executable.memory = super().memory_for(executable, nodes)
        return list(executable.memory)


class RacyEvents(SoundDevice):
    """The event of a pass has happened before its work has ended."""

    def submit(
        self, work: Callable[[], None], after: Sequence[Event], queue: int, held: Sequence[Buffer]
    ) -> Event:
        super().submit(work, after, queue, held)
        return DONE


class _Freed(SoundBuffer):
    def __del__(self) -> None:
        if self.array.dtype.kind == "f":
            self.array[...] = np.nan  # another tensor lies there now


class FreedEarly(SoundDevice):
    """Memory goes with the Buffer object, though queued work still reads it."""

    def buffer(self, array: Array) -> SoundBuffer:
        return _Freed(self, array)

    def submit(
        self, work: Callable[[], None], after: Sequence[Event], queue: int, held: Sequence[Buffer]
    ) -> Event:
        return super().submit(work, after, queue, ())


class OffByOne(SoundDevice):
    """A sum loses its last element where one is left behind the last block of 32."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if operator_name(node) in ("aten.sum.dim_IntList", "aten.mean.dim") and args[1]:
            axis = args[1][0]
            length = args[0].shape[axis] if args[0].ndim else 0
            if length > 32 and length % 32 == 1:
                kept = np.take(args[0], range(length - 1), axis)
                return super().kernel(node, (kept, *args[1:]), kwargs)
        return super().kernel(node, args, kwargs)


class WrongGradient(SoundDevice):
    """The gradient of a convolution's weight is a tenth of a percent too large."""

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
    """Arithmetic of int64 is done in float32."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        result = super().kernel(node, args, kwargs)
        if isinstance(result, np.ndarray) and result.dtype == np.int64:
            return result.astype(np.float32)
        return result


class Leaking(SoundDevice):
    """Results stay in a list for ever."""

    def memory_for(self, executable: SoundExecutable, nodes: Sequence[fx.Node]) -> list[Array]:
        memory = super().memory_for(executable, nodes)
        self.__dict__.setdefault("kept", []).extend(memory)
        return memory


class Chance(SoundDevice):
    """Products are summed in an order that is left to chance."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if operator_name(node) == "aten.mm.default":
            order = np.random.default_rng().permutation(args[0].shape[1])
            return args[0][:, order] @ args[1][order]
        return super().kernel(node, args, kwargs)


class DonatedTooEarly(SoundDevice):
    """The memory of a donated input is given to the first result before the others are made."""

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
    """A result that is a view of an input lies in the input's memory."""

    def store(
        self, executable: SoundExecutable, values: dict[fx.Node, Array], results: Sequence[Array],
        donated: Mapping[fx.Node, Array],
    ) -> None:  # fmt: skip
        super().store(executable, values, results, donated)
        for node, buffer in zip(executable.created, self.last, strict=True):
            if values[node].base is not None and values[node].flags.c_contiguous:
                buffer.array = values[node]
        for array in donated.values():  # whose memory is used again
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
    """An index out of range reads what is there."""

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
    """`supports` accepts everything, and compile does not."""

    def supports(self, node: fx.Node) -> str | None:
        return None

    def compile(self, graph: fx.GraphModule) -> Executable:
        for node in graph.graph.nodes:
            if node.op == "call_function" and super().supports(node):
                from hetpipe.sdk import UnsupportedOperatorError

                raise UnsupportedOperatorError(f"{self.info.id}: no {operator_name(node)}")
        return SoundExecutable(self, graph)


class Overwriting(SoundDevice):
    """Additions are done in place, whether the input is donated or not."""

    def kernel(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        result = super().kernel(node, args, kwargs)
        is_input = getattr(node.args[0], "op", "") == "placeholder" if node.args else False
        if operator_name(node) == "aten.add.Tensor" and is_input and args[0].shape == result.shape:
            args[0][...] = result
        return result


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
        Fault(RacyEvents, "events/after the work", "a racy event: it completes before the work"),
        Fault(FreedEarly, "memory/dropped while queued", "memory that is freed early"),
        Fault(OffByOne, "lengths/sum", "an off-by-one reduction"),
        Fault(WrongGradient, "operators/conv", "of its gradient"),
        Fault(WrongPadding, "operators/conv_pad_stride", "of its gradient: boundaries, padding"),
        Fault(IgnoredDtype, "dtypes/int64", "a dtype that is silently ignored"),
        Fault(Leaking, "memory/no leaks", "leaking"),
        Fault(Chance, "determinism/run to run", "order is left to chance"),
        Fault(DonatedTooEarly, "memory/donation", "a donated input that is read later"),
        Fault(Aliasing, "memory/results of their own", "a result that aliases an input"),
        Fault(Unchecked, "values/index out of range", "an index that nobody checks"),
        Fault(SharedScratch, "queues/passes at once", "share scratch memory", Capabilities(2)),
        Fault(
            EarlyChunks, "chunks/parts of results", "reported too early", Capabilities(chunks=True)
        ),
        Fault(SaysYes, "contract/refusals", "`supports` says yes, and compile says no"),
        Fault(Overwriting, "memory/inputs last", "overwritten in place"),
    )
}


def backend_of(fault: Fault) -> type[SoundBackend]:
    """A backend with the broken device, registered as `broken`."""
    fields = {"name": "broken", "device": fault.device, "capabilities": fault.capabilities}
    registry._registered.pop("broken", None)
    registry._instances.pop("broken", None)
    return registry.register_backend(type("Broken", (SoundBackend,), fields))  # type: ignore[return-value]


def results_of(fault: Fault, names: Sequence[str] = (), level: Level = Level.CORE) -> list[Result]:
    """The results of all checks of a level on a broken device, or of those that are named."""
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
