"""A graph that a library has compiled, and its runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import DONE, Buffer, Chunk, Event, Executable
from hetpipe.sdk.inputs import Form, check_inputs

from .events import NativeEvent, sweep
from .library import Handle, interface
from .opened import NativeBuffer, OpenedDevice


class NativeExecutable(Executable):
    """A graph that a library has compiled; `program` is None if the graph computes nothing.

    For each output of the graph, `places` has the index of the program's output, or `~i` if the
    output is placeholder i.
    """

    def __init__(
        self,
        device: OpenedDevice,
        program: Handle | None,
        inputs: Sequence[Form],
        outputs: Sequence[Form],
        places: Sequence[int],
    ) -> None:
        self._device = device
        self._program = program
        self._inputs, self._outputs = inputs, outputs
        self._places = places

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        device = self._device
        check_inputs(device.info.id, inputs, self._inputs)
        memories = [device.memory_of(buffer) for buffer in inputs]
        sweep()
        earlier = self._order(after)
        if self._program is None:
            return [inputs[~place] for place in self._places], DONE, ()
        # A buffer that is two inputs, or an input and an output, is not donated.
        going_on = {~place for place in self._places if place < 0}
        given = {i for i in donate - going_on if memories.count(memories[i]) == 1}
        pointers, made, event = self._queue(memories, given, earlier, queue)
        buffers = []
        for pointer, form in zip(pointers, self._outputs, strict=True):
            buffers.append(NativeBuffer(device, form, self._claim(pointer, memories, given)))
            made.append(buffers[-1].memory)
        for memory, buffer in zip(memories, inputs, strict=True):
            if memory in made:
                assert isinstance(buffer, NativeBuffer)
                buffer.memory = None
        return [inputs[~p] if p < 0 else buffers[p] for p in self._places], event, ()

    def _order(self, after: Sequence[Event]) -> list[Handle]:
        """Return the events that the library must wait for, after waiting for all others here.

        Raises the errors of failed events.
        """
        handles = []
        for event in after:
            handle = None
            if isinstance(event, NativeEvent) and event.device is self._device:
                handle = event.pending if self._program is not None else None
            if handle is None:
                event.wait()
            else:
                handles.append(handle)
        return handles

    def _queue(
        self, memories: list[Handle], given: set[int], earlier: list[Handle], queue: int
    ) -> tuple[list[Any], list[Handle | None], Event]:
        """Queue the run; return its outputs' pointers, a list for their handles, and the event.

        The event holds the list.
        """
        ffi, device, program = interface(), self._device, self._program
        assert program is not None
        outputs = ffi.new("hetpipe_buffer *[]", len(self._outputs))
        event = ffi.new("hetpipe_event **")
        device.library.call(
            device.info.id,
            "run",
            program.pointer,
            queue,
            ffi.new("hetpipe_buffer *[]", [memory.pointer for memory in memories]),
            bytes(i in given for i in range(len(memories))),
            outputs,
            ffi.new("hetpipe_event *[]", [handle.pointer for handle in earlier]),
            len(earlier),
            event,
        )
        made: list[Handle | None] = []
        ended = device.event(event[0], [program, memories, earlier, made])
        return list(outputs), made, ended

    def _claim(self, pointer: Any, memories: list[Handle], given: set[int]) -> Handle:
        """Return the handle of an output: a new one, or the handle of a donated input."""
        path = self._device.library.path
        if pointer == interface().NULL:
            raise BackendError(f"{path}: run succeeds, and an output is NULL")
        for number, memory in enumerate(memories):
            if memory.pointer == pointer and number not in given:
                raise BackendError(
                    f"{path}: run returns input {number}, which was not donated, or twice"
                )
            if memory.pointer == pointer:
                given.remove(number)
                return memory
        return self._device.memory(pointer)
