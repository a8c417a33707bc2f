"""Keeps the values of a stage on its device by place, and the values of each micro-batch until
nobody reads them (stations 6, 8 and 11 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hetpipe.capture.program import (
    BUFFER,
    CONSTANT,
    COUNT,
    GRAD,
    LOSS,
    OUTPUT,
    PARAM,
    SCALAR,
    STATE,
    Slot,
    StageGraphs,
)
from hetpipe.sdk.backend import Buffer, Device, Group
from hetpipe.sdk.host.validation import check_summed, upload
from hetpipe.wire.wire import Array, Layout, host_dtype
from hetpipe.worker.bind import Binding, Key, PassBindings, Place, StageBinding, Table
from hetpipe.worker.weights import Version, Weights

Entries = list[Any]
"""Buffers, or None for entries without a value."""


class Store:
    """A stage's buffers, constants, gradients, optimizer state and scalars, and first parameters.

    Parameters and buffers come by `put`, unless they are `held`: on the device already. Gradients
    start at zero, state starts at `state_init(shape, dtype)`. Late gradients that are zero have no
    buffer.
    """

    def __init__(
        self,
        device: Device,
        binding: StageBinding,
        graphs: StageGraphs,
        state_init: Callable[..., Array],
        held: Mapping[Key, Buffer],
    ) -> None:
        self.device = device
        self.weights: Weights  # set by the stage
        self._slots, self._places = binding.slots, binding.places
        self._late = {
            self._places[key].entry: slot
            for key, slot in binding.slots.items()
            if slot.role == GRAD and self._places[key].entry in binding.late
        }
        self._scalars: dict[str, float] = {}
        makers: dict[str, Callable[[Slot], Array]] = {
            CONSTANT: lambda slot: graphs.constants[slot.name],
            GRAD: _zeros,
            STATE: lambda slot: state_init(slot.shape, host_dtype(slot.dtype)),
        }
        tables: dict[Table, Entries] = {table: [None] * binding.sizes[table] for table in Table}
        for key, place in self._places.items():
            slot = self._slots[key]
            if key in held:
                tables[place.table][place.entry] = held[key]
            elif slot.role in makers and not self._is_late(place):
                tables[place.table][place.entry] = self.upload(makers[slot.role](slot))
        self.parameters: Version = tables[Table.PARAMS]  # the first version
        self.entries: Entries = tables[Table.STORE]
        buffers = [place for key, place in self._places.items() if key[0] == BUFFER]
        self._buffer_indices = [place.entry for place in buffers if place.table is Table.STORE]

    def get(self, key: Key, version: Version | None = None) -> Array:
        """Return the value of a parameter, buffer, gradient or state, on the host. Parameters are
        of this version, or present ones."""
        table, index = self._table(key, version)
        if table[index] is None and self._is_late(self._places[key]):
            return _zeros(self._slots[key])
        return self.download(self._slots[key], table[index])

    def read_into(self, key: Key, memory: Array) -> Array:
        """Copy a value into the first bytes of `memory`, and return it as an array there."""
        table, index = self._table(key)
        slot = self._slots[key]
        array = memory[: slot.nbytes].view(host_dtype(slot.dtype)).reshape(slot.shape)
        self.device.download(table[index], array).wait()
        return array

    def find_buffers(self, keys: Collection[Key]) -> dict[Key, Buffer]:
        """Return the present buffers of these values, if the stage has them."""
        tables = {key: self._table(key) for key in keys if key in self._places}
        return {
            key: table[index] for key, (table, index) in tables.items() if table[index] is not None
        }

    def missing(self) -> list[Key]:
        """Return the parameters and buffers that have no value yet."""
        keys = [key for key, slot in self._slots.items() if slot.role in (PARAM, BUFFER)]
        return [key for key in keys if key not in self.find_buffers(keys)]

    def put(self, key: Key, value: Array) -> Buffer | None:
        """Replace a value. Return the buffer of a lasting value that had no buffer before."""
        table, index = self._table(key)
        if self._is_late(self._places[key]):
            table[index] = self.upload(value) if np.any(value) else None
            return None
        is_new = table[index] is None
        table[index] = self.upload(value)
        return table[index] if is_new else None

    def swap(self, one: Key, other: Key) -> None:
        """Exchange two values that have a buffer."""
        (table, index), (others, other_index) = self._table(one), self._table(other)
        table[index], others[other_index] = others[other_index], table[index]

    def put_scalars(self, scalars: Mapping[str, float]) -> list[Buffer]:
        """Set the scalars that programs read, if they change. Return the buffers of new scalars."""
        new = []
        for name, value in scalars.items():
            slot = self._slots.get((SCALAR, name))
            if slot is not None and self._scalars.get(name) != value:
                new.append(self.put(slot.key, np.asarray(value, host_dtype(slot.dtype))))
                self._scalars[name] = value
        return [buffer for buffer in new if buffer is not None]

    def zero_gradients(self) -> None:
        for key, slot in self._slots.items():
            if slot.role == GRAD:
                self.put(key, _zeros(slot))

    def sum_gradients(self, group: Group, keys: Collection[Key], scale: float) -> None:
        """Multiply gradients by `scale`, and let a group of devices sum them."""
        self.make_gradients()
        buffers = self.find_buffers(keys)
        summed = group.sum([*buffers.values()], scale)
        outputs, event = check_summed(self.device, summed, len(buffers))
        event.wait()
        for key, buffer in zip(buffers, outputs, strict=True):
            table, index = self._table(key)
            table[index] = buffer

    def bad_gradient(self) -> str:
        """Return the name of a gradient that is not finite; "" if there is none."""
        gradients = (key for key, slot in self._slots.items() if slot.role == GRAD)
        return next((key[1] for key in gradients if not np.isfinite(self.get(key)).all()), "")

    def begins_gradients(self) -> bool:
        """Return whether the next backward creates the late gradients. If it adds to them instead,
        first make the missing gradients."""
        if self._late and all(self.entries[index] is None for index in self._late):
            return True
        self.make_gradients()
        return False

    def make_gradients(self) -> None:
        """Give missing late gradients a buffer of zeros."""
        for index, slot in self._late.items():
            if self.entries[index] is None:
                self.entries[index] = self.upload(_zeros(slot))

    def drop_late_gradients(self) -> None:
        """Forget the late gradients, which have been applied."""
        for index in self._late:
            self.entries[index] = None

    def buffers(self) -> list[Buffer]:
        """Return the model's buffers, such as batch norms' statistics. A pass makes new buffers, so
        the returned buffers keep their values."""
        return [self.entries[index] for index in self._buffer_indices]

    def restore(self, buffers: list[Buffer]) -> None:
        """Put back the result of an earlier call of `buffers`."""
        for index, buffer in zip(self._buffer_indices, buffers, strict=True):
            self.entries[index] = buffer

    def upload(self, value: Array) -> Buffer:
        """Copy to the device, and wait for the copy."""
        buffer, event = upload(self.device, np.asarray(value, order="C"))
        event.wait()
        return buffer

    def download(self, slot: Slot, buffer: Buffer) -> Array:
        """Copy to the host, and wait for the copy."""
        array = np.empty(slot.shape, host_dtype(slot.dtype))
        self.device.download(buffer, array).wait()
        return array

    def _is_late(self, place: Place) -> bool:
        return place.table is Table.STORE and place.entry in self._late

    def _table(self, key: Key, version: Version | None = None) -> tuple[Entries, int]:
        place: Place = self._places[key]
        if place.table is not Table.PARAMS:
            return self.entries, place.entry
        return self.weights.present if version is None else version, place.entry


def _zeros(slot: Slot) -> Array:
    return np.zeros(slot.shape, host_dtype(slot.dtype))


class Frames:
    """A frame for each micro-batch. Lanes use frames of different micro-batches at once."""

    def __init__(self, binding: StageBinding) -> None:
        self._binding = binding
        self._frames: dict[int, Entries] = {}

    def of(self, microbatch: int) -> Entries:
        """Return the frame of a micro-batch, an empty frame the first time."""
        frame = self._frames.get(microbatch)
        if frame is None:
            frame = self._frames[microbatch] = self.empty()
        return frame

    def empty(self) -> Entries:
        """Return a frame that belongs to no micro-batch."""
        return [None] * self._binding.sizes[Table.FRAME]

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
        self._outputs: dict[int, dict[str, Array]] = {}  # by micro-batch

    def has(self, role: str) -> bool:
        """Return whether the stage makes losses (LOSS) or counts (COUNT)."""
        return self._indices[role] is not None

    def keep(self, microbatch: int, frame: Entries, forward: Binding | None) -> None:
        """Keep the loss and the count that a forward has made, and take the tensors of the model's
        output to the host; without the binding `forward`, leave them."""
        for role, index in self._indices.items():
            if index is not None and frame[index] is not None:  # inference makes no loss
                self._results[role][microbatch] = frame[index]
        if forward is None:
            return
        self._outputs[microbatch] = {}
        for slot, place in zip(forward.program.outputs, forward.targets, strict=True):
            if slot.role == OUTPUT:
                array = self._store.download(slot, frame[place.entry])
                self._outputs[microbatch][slot.name], frame[place.entry] = array, None

    def take_output(self) -> list[dict[str, Array]]:
        """Return the outputs since the last call, ordered by micro-batch."""
        outputs, self._outputs = self._outputs, {}
        return [outputs[m] for m in sorted(outputs)]

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
