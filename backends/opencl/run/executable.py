"""A lowered graph that is ready to run: arguments are set once, each run enqueues launches."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import DONE, Buffer, Chunk, Event, Executable
from hetpipe.sdk.inputs import check_inputs

from ..lower.arena import lives, nbytes
from ..lower.expr import Value
from ..lower.launch import Block, Launch, blocks_of, finished_parts
from ..lower.lowering import Lowered
from ..platform.driver import driver, errors
from .events import CommandEvent, Flowing, Outcome, PassEvent, commands_of
from .memory import Memory, OpenCLBuffer, Part, PassQueue, room_nbytes
from .opened import OpenedDevice
from .placement import NOTHING, Arguments, Given, Plan, Where, given, heirs_of, plan

RUNNING = "running a graph"


class _Step(NamedTuple):
    """A launch that is ready to be enqueued, in one block or several."""

    number: int
    kernel: Any
    local_size: tuple[int, ...] | None
    blocks: list[Block]
    beside: int
    joined: bool
    """Whether kernels in other queues send data to this launch."""


@dataclass
class _Enqueued:
    """The commands that a run has enqueued."""

    last: Any = None
    """The last command in the pass's queue."""
    blocks: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """The commands of each launch that runs in several blocks, by the launch's number."""
    beside: dict[int, Any] = field(default_factory=dict)
    """The last command in each additional queue, by the queue's number."""
    flowing: list[Flowing] = field(default_factory=list)


class OpenCLExecutable(Executable):
    """Launches in order; only the arguments for inputs and outputs change between runs."""

    def __init__(self, device: OpenedDevice, lowered: Lowered) -> None:
        """The programs of `lowered` must be built already."""
        self._device = device
        self._lowered = lowered
        self._forms = tuple((value.shape, value.dtype) for value in lowered.inputs)
        self._kept: dict[int, Memory] = {}
        """Memory of the results of steady launches, by id. The second run with the same weights
        allocates it; if a mini-batch is one micro-batch, there is no second run."""
        self._arguments = Arguments()
        streams = device.info.capabilities.chunks
        values = [output.value for output in lowered.outputs]
        self._parts = finished_parts(values, lowered.launches) if streams else []
        """The parts of outputs that are complete when one block of a launch ends."""
        in_blocks = {each.launch for each in self._parts}
        self._place_of = {output: place for place, output in enumerate(lowered.results)}
        self._steps: list[_Step] = []
        for number, launch in enumerate(lowered.launches):
            kernel = device.programs.kernel(launch.kernel)
            with errors(device.info.id, f"setting arguments of {launch.kernel.name}"):
                for at, arg in enumerate(launch.args):
                    if not isinstance(arg, Value):
                        kernel.set_arg(
                            at, np.float32(arg) if isinstance(arg, float) else np.int32(arg)
                        )
                    else:
                        self._arguments.add(arg.id, kernel, at)
            whole: list[Block] = [(None, launch.global_size)]
            blocks = blocks_of(launch) if number in in_blocks else whole
            joined = number > 0 and lowered.launches[number - 1].beside > 0
            step = _Step(number, kernel, launch.local_size, blocks, launch.beside, joined)
            self._steps.append(step)
        pairs = zip(lowered.launches, self._steps, strict=True)
        self._changing = [step for launch, step in pairs if not launch.steady]
        """The steps that each run repeats while the weights stay the same."""
        read = {arg.id for each in lowered.launches if each.steady for arg in each.args
                if isinstance(arg, Value)}  # fmt: skip
        self._steady = [slot for slot, value in enumerate(lowered.inputs) if value.id in read]
        self._weights: list[weakref.ref[OpenCLBuffer]] = []
        self._queue = device.pass_queue(0)
        self._last: Any = None
        self._plans: dict[tuple[frozenset[int], Given, bool], Plan] = {}

    @property
    def launches(self) -> Sequence[Launch]:
        return self._lowered.launches

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        device = self._device
        buffers = self._check(inputs)
        waits = commands_of(device, after)
        if device.pass_queue(queue) is not self._queue:
            self._move(device.pass_queue(queue))
        with device.enqueueing, errors(device.info.id, "enqueueing a graph"):
            device.retired.clear()
            outputs = self._outputs(buffers, donate, queue)
            checked = [device.memory.take(nbytes(c.value), queue) for c in self._lowered.checks]
            self._bind(buffers, outputs, checked)
            weights = [buffers[slot] for slot in self._steady]
            same = self._are_same(weights)
            if same and self._steady and not self._kept:
                self._keep()
                same = False
            self._weights = []  # unknown until the launches that read the weights are enqueued
            steps = self._changing if same else self._steps
            done = self._enqueue(steps, waits)
            self._weights = [weakref.ref(buffer) for buffer in weights]
            command, outcomes = self._read_checks(checked, done.last)
        event: Event = DONE
        if command is not None:
            event = PassEvent(device, command, RUNNING, outcomes, done.flowing)
        chunks = [
            (
                self._place_of[t.output],
                t.lo,
                t.hi,
                CommandEvent(device, done.blocks[t.launch][t.block], RUNNING),
            )
            for t in self._parts
        ]
        return [outputs[index] for index in self._lowered.results], event, chunks

    def _are_same(self, weights: Sequence[OpenCLBuffer]) -> bool:
        """Return whether the last run had the same weights."""
        last_weights = self._weights
        return len(last_weights) == len(weights) and all(
            last() is buffer for last, buffer in zip(last_weights, weights, strict=True)
        )

    def _enqueue(self, steps: Sequence[_Step], waits: list[Any] | None) -> _Enqueued:
        """Enqueue the steps, to run after the commands `waits`."""
        queue, done = self._queue, _Enqueued()
        main, last, launch = queue.cl, None, driver().enqueue_nd_range_kernel
        size: tuple[int, ...] = ()
        kernel: Any = None
        local_size: tuple[int, ...] | None = None
        try:
            # A graph has hundreds of small launches, so this loop avoids calls and look-ups.
            for number, kernel, local_size, blocks, beside, joined in steps:
                if beside:
                    ((offset, size),) = blocks
                    begun = last or queue.last
                    before = [*(waits or ()), *([begun] if begun else [])] or None
                    command = launch(queue.beside(beside), kernel, size, local_size, offset, before)
                    done.flowing.append((kernel.function_name, command))
                    done.beside[beside] = command
                    continue
                for offset, size in blocks:
                    last = launch(main, kernel, size, local_size, offset, waits)
                    waits = None
                    if joined:
                        done.flowing.append((kernel.function_name, last))
                    if len(blocks) > 1:
                        done.blocks[number].append(last)
        except driver().Error as error:
            doing = f"enqueueing {kernel.function_name}, {size} by {local_size}"
            with errors(self._device.info.id, doing):
                raise error
        done.last = last
        if done.beside:
            # The pass ends when all its kernels end. A kernel hangs if its reader ended early.
            ends = [*done.beside.values(), done.last]
            done.last = driver().enqueue_marker(queue.cl, wait_for=ends)
        elif done.last is None and waits:
            done.last = driver().enqueue_marker(queue.cl, wait_for=waits)
        if done.last is not None:
            queue.flush()
            queue.last = self._last = done.last
        return done

    def _read_checks(self, memories: Sequence[Memory], command: Any) -> tuple[Any, list[Outcome]]:
        """Return the pass's last command, and the checks' outcomes, valid when it has ended."""
        outcomes = []
        for check, memory in zip(self._lowered.checks, memories, strict=True):
            host = memory.host
            if host is None:
                host = np.empty(nbytes(check.value), np.uint8)
                command = driver().enqueue_copy(self._queue.cl, host, memory.cl, is_blocking=False)
            outcomes.append(Outcome(check.bound, memory, host))
        if outcomes and outcomes[0].memory.host is None:
            self._queue.cl.flush()
            self._queue.last = self._last = command
        return command, outcomes

    def _move(self, queue: PassQueue) -> None:
        """Run in another queue from now on, and use its arena."""
        if self._last is not None:
            with errors(self._device.info.id, RUNNING):
                self._last.wait()
        self._queue = queue

    def _keep(self) -> None:
        """Give the results of steady launches memory that no other tensor shares."""
        if self._last is not None:
            self._last.wait()
        launches, crossing = self._lowered.launches, self._lowered.crossing
        self._kept = {
            key: self._device.memory.take(span.nbytes)
            for key, span in lives(launches).items()
            if key not in crossing and launches[span.first].steady
        }
        self._plans.clear()
        for key, kept in self._kept.items():
            self._arguments.set(key, kept.cl)

    def _bind(
        self,
        buffers: Sequence[OpenCLBuffer],
        outputs: Sequence[OpenCLBuffer],
        checked: Sequence[Memory],
    ) -> None:
        """Set the arguments for the graph's inputs, outputs and checks."""
        lowered, bind = self._lowered, self._arguments.set
        for value, buffer in zip(lowered.inputs, buffers, strict=True):
            bind(value.id, buffer.memory.cl)
        for output, buffer in zip(lowered.outputs, outputs, strict=True):
            if output.value is not None:
                bind(output.value.id, buffer.memory.cl)
        for check, memory in zip(lowered.checks, checked, strict=True):
            bind(check.value.id, memory.cl)

    def _check(self, inputs: Sequence[Buffer]) -> list[OpenCLBuffer]:
        check_inputs(self._device.info.id, inputs, self._forms)
        mine = []
        for index, buffer in enumerate(inputs):
            if not isinstance(buffer, OpenCLBuffer) or buffer.device is not self._device:
                raise BackendError(f"input {index} is not on {self._device.info.id}: upload it")
            mine.append(buffer)
        return mine

    def _outputs(
        self, buffers: list[OpenCLBuffer], donate: frozenset[int], queue: int
    ) -> list[OpenCLBuffer]:
        """Place a run's results and intermediates in memory; return the buffers of the results."""
        if donate:
            # If two inputs are one buffer, launches may read it as either: do not overwrite it.
            memories = [buffer.memory for buffer in buffers]
            if len(set(map(id, memories))) < len(memories):
                donate = frozenset(i for i in donate if memories.count(memories[i]) == 1)
        whole, parts = given(buffers, donate) if donate else (None, NOTHING)
        key = donate, parts, self._arguments.moves
        if key not in self._plans:
            self._plans[key] = self._plan(*key)
        plan = self._plans[key]
        new = self._device.memory.take(plan.new_nbytes, queue) if plan.new_nbytes else None
        arena = self._device.arena(plan.arena_nbytes, self._queue) if plan.arena_nbytes else None
        self._arguments.settle(plan, whole, new, arena)
        wholes = {Where.DONATED: whole, Where.NEW: new}
        outputs = []
        for output, heir in zip(self._lowered.outputs, plan.heirs, strict=True):
            if (value := output.value) is None:
                assert output.source is not None
                outputs.append(buffers[output.source])
                continue
            memory: Memory | Part
            spot = plan.spots.get(value.id)
            if heir is not None:
                memory = buffers[heir].memory
            elif spot is not None and (inside := wholes[spot.where]) is not None:
                memory = Part(inside, spot.begin, spot.nbytes)
            else:
                memory = self._device.memory.take(nbytes(value), queue)
            outputs.append(OpenCLBuffer(self._device, value.shape, value.dtype, memory))
        return outputs

    def _plan(self, donate: frozenset[int], parts: Given, moves: bool) -> Plan:
        target = self._device.target
        if not target.checks_memory:
            apart = frozenset(self._kept)
            return plan(self._lowered, donate, parts, apart, target.alignment_nbytes, moves)
        # Allocate each tensor alone, so that an interpreter of kernels sees accesses outside it.
        life = lives(self._lowered.launches)
        for key in self._arguments.unset(life.keys() - self._lowered.crossing):
            piece = self._device.memory.create(room_nbytes(life[key].nbytes))
            self._arguments.set(key, piece.cl)
        return Plan(heirs_of(self._lowered, donate), {}, 0, 0)
