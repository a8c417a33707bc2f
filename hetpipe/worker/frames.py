"""Keeps the values of each micro-batch in a stage, until nobody reads them (stations 6, 8 and 11 of
docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.capture.program import COUNT, LOSS
from hetpipe.sdk.backend import Buffer
from hetpipe.wire.wire import Layout
from hetpipe.worker.bind import PassBindings, StageBinding, Table
from hetpipe.worker.store import Entries, Store


class Frames:
    """A frame for each micro-batch. Lanes use frames of different micro-batches at once."""

    def __init__(self, binding: StageBinding) -> None:
        self._binding = binding
        self._frames: dict[int, Entries] = {}

    def of(self, microbatch: int) -> Entries:
        """Return the frame of a micro-batch; an empty one the first time."""
        frame = self._frames.get(microbatch)
        if frame is None:
            frame = self._frames[microbatch] = self.empty()
        return frame

    def empty(self) -> Entries:
        """Return a frame that belongs to no micro-batch."""
        return [None] * self._binding.sizes[Table.FRAME]

    def all(self) -> list[Entries]:
        """Return all frames."""
        return list(self._frames.values())

    def arrive(self, microbatch: int, layout: Layout, buffers: Sequence[Buffer]) -> None:
        """Store tensors that came from a neighbour."""
        frame = self.of(microbatch)
        for slot, buffer in zip(layout, buffers, strict=True):
            frame[self._binding.places[slot.key].entry] = buffer

    def depart(self, microbatch: int, samples: int, layout: Layout) -> list[Buffer]:
        """Return the tensors for a neighbour. Drop the tensors that no backward reads."""
        frame, passes = self._frames[microbatch], self._binding.passes
        kept = passes[samples].kept if samples in passes else frozenset()
        indices = [self._binding.places[slot.key].entry for slot in layout]
        buffers = [frame[index] for index in indices]
        for index in indices:
            if index not in kept:
                frame[index] = None
        return buffers

    def release(self, microbatch: int) -> None:
        """Forget a micro-batch."""
        self._frames.pop(microbatch, None)

    @staticmethod
    def let_go(frame: Entries, bindings: PassBindings, number: int) -> None:
        """Drop the values that nobody reads after pass `number` of a micro-batch."""
        for index in bindings.dead[number]:
            frame[index] = None


class Results:
    """Losses and counts of micro-batches since they were last taken."""

    def __init__(self, binding: StageBinding, store: Store) -> None:
        self._store = store
        self._slots = {slot.role: slot for slot in binding.slots.values()}
        self._indices = {role: binding.index_of(role) for role in (LOSS, COUNT)}
        self._results: dict[str, dict[int, Buffer | float]] = {LOSS: {}, COUNT: {}}

    def has(self, role: str) -> bool:
        """Return whether the stage makes losses, or counts."""
        return self._indices[role] is not None

    def keep(self, microbatch: int, frame: Entries) -> None:
        """Keep the loss and the count that a forward has made."""
        for role, index in self._indices.items():
            if index is not None:
                self._results[role][microbatch] = frame[index]

    def peek(self, role: str) -> dict[int, float]:
        """Return losses or counts by micro-batch, each downloaded once."""
        results = self._results[role]
        values = {
            microbatch: result
            if isinstance(result, float)
            else float(self._store.download(self._slots[role], result))
            for microbatch, result in results.items()
        }
        results.update(values)
        return values

    def take(self, role: str) -> tuple[float, ...] | None:
        """Return losses or counts since the last call, ordered by micro-batch; None without any."""
        values = self.peek(role)
        self._results[role] = {}
        return tuple(values[m] for m in sorted(values)) or None
