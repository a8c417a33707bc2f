"""A loaded stage: runs its passes and updates on a device (stations 7, 10, 11 and 14 of
docs/life-of-a-micro-batch.md).

`bind` has given every value a place at load. A run takes its inputs from three tables (a version of
the parameters, the store, and the micro-batch's frame) and puts its outputs there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from hetpipe.capture.passes.division import has_sums
from hetpipe.capture.program import COUNT, CUT, GRAD, LOSS, PARAM, RNG, TANGENT, Slot, StageGraphs
from hetpipe.errors import HetpipeError
from hetpipe.schedule.action import Op
from hetpipe.sdk.backend import Buffer, Device, Event, Executable
from hetpipe.sdk.graph import of_one_replica
from hetpipe.sdk.host.validation import check_ran, upload
from hetpipe.wire.messages import Keep
from hetpipe.wire.transport import EdgeClosedError
from hetpipe.wire.wire import Array, Content, Leaving, host_dtype
from hetpipe.worker.bind import Binding, Key, StageBinding
from hetpipe.worker.blame import run_error
from hetpipe.worker.divided import Meet, compile_programs
from hetpipe.worker.loans import Loans
from hetpipe.worker.memory import Memory
from hetpipe.worker.store import Entries, Frames, Results, Store
from hetpipe.worker.weights import Predicted, Version, make_weights

CHECKED = (CUT, LOSS, TANGENT, GRAD, PARAM)
"""Roles of the outputs of passes and updates that `check_finite` checks."""


class Pass(NamedTuple):
    """One pass of a micro-batch of `samples`: a forward, a backward or half of one.

    `feed` has the leaves of the batch that the pass uploads, `rng` is (seed, mini-batch, first
    sample's index); `lag` and `ahead` choose the version of the weights for a forward
    (`hetpipe.worker.weights`).
    `loss_tangent` is the gradient from which the last stage's backward starts. `queue` is the
    number of the lane's queue on the device. `forwards` says which forward runs: for training, or
    in eval mode; `keeps_output` keeps the model's output for the controller.
    """

    op: Op
    microbatch: int
    samples: int
    feed: Mapping[str, Array] = MappingProxyType({})
    rng: tuple[int, int, int] = (0, 0, 0)
    lag: int = 0
    ahead: int = 0
    loss_tangent: float = 0.0
    forwards: Content = Content.FORWARD
    keeps_output: bool = False
    queue: int = 0
    mini_batch: int = 0


class Stage:
    """One stage on one device, with its parameters, buffers, gradients and optimizer state.

    A forward and a backward of different micro-batches may run at once, on two threads and queues:
    each micro-batch has its own frame, only backwards write gradients, and only forwards write
    buffers.
    """

    def __init__(
        self,
        device: Device,
        graphs: StageGraphs,
        state_init: Callable[..., Array],
        keep: Keep,
        meet: Meet | None = None,
        held: Mapping[Key, Buffer] | None = None,
    ) -> None:
        """Load the stage. Parameters and buffers come by `put`, unless they are `held` already."""
        self.device = device
        self.number = graphs.stage
        self._meet = meet
        self._keep = keep
        self._binding = binding = StageBinding(graphs, keep.late_gradients)
        self.store = Store(device, binding, graphs, state_init, held or {})
        predict = None if binding.predict is None else self._predict
        self.weights = make_weights(keep, graphs.stage, self.store.parameters, predict)
        self.store.weights = self.weights
        self._executables: dict[int, Executable] = {}  # by the identity of their bindings
        self._compile(binding.used(predicts=isinstance(self.weights, Predicted)))
        self.frames = Frames(binding)
        self.results = Results(binding, self.store)
        self._between: dict[int, Version] = {}  # by micro-batch, between a backward's halves
        self._before: list[Buffer] | None = None  # the store's buffers before this mini-batch
        self._rng = binding.index_of(RNG)
        self._tangents: dict[float, Buffer] = {}  # by value: gradients of the loss
        self.memory = Memory(self.store.entries, binding.late_nbytes)
        for key, buffer in (held or {}).items():
            if key[0] == PARAM:
                self.memory.stay(buffer, versioned=key in binding.trained)
        self.loans = Loans(self.weights, binding.entries(PARAM, graphs.borrowed), self.memory, keep)
        if self.weights.number:
            self._put_scalars({**keep.rates, "step": float(self.weights.number)})

    @property
    def has_loss(self) -> bool:
        """Whether the stage ends with the loss."""
        return self.results.has(LOSS)

    @property
    def has_count(self) -> bool:
        """Whether the loss is a sum and comes with a count."""
        return self.results.has(COUNT)

    def run(self, which: Pass, leaving: Leaving | None = None) -> None:
        """Run a pass. When the device begins to make the outputs, `leaving` gets the outputs."""
        if which.forwards is not Content.FORWARD:
            self._evaluate(which)
        elif which.op is Op.FORWARD:
            self._forward(which, leaving)
        elif which.op is Op.BACKWARD_WEIGHT:
            self._backward(1, which, self._between.pop(which.microbatch), leaving)
        else:
            version = self.weights.backward(which.microbatch)
            if which.op is Op.BACKWARD_INPUT:
                self._between[which.microbatch] = version
            self._backward(0, which, version, leaving)

    def _forward(self, which: Pass, leaving: Leaving | None) -> None:
        bindings = self._binding.passes[which.samples]
        frame = self.frames.of(which.microbatch)
        after = self._feed(frame, bindings.feeds, which)
        if self._before is None and self._keep.policy.flushes:
            self._before = self.store.buffers()
        version = self.loans.forward(which.mini_batch, which.microbatch, which.lag, which.ahead)
        read = self.loans.complete(version, which.mini_batch)
        self._run(bindings.forward, read, frame, after, queue=which.queue, leaving=leaving)
        self._account(0, which, frame, version)
        self.results.keep(which.microbatch, frame, bindings.forward if which.keeps_output else None)
        self.frames.let_go(frame, bindings, 0)

    def _backward(self, part: int, which: Pass, version: Version, leaving: Leaving | None) -> None:
        """Run a backward, or half `part` of it, and drop the values that nobody reads later."""
        bindings = self._binding.passes[which.samples]
        if not bindings.backwards:
            return
        frame = self.frames.of(which.microbatch)
        if (place := self._binding.places.get((TANGENT, LOSS))) is not None:
            frame[place.entry] = self._loss_tangent(which.loss_tangent)
        late = [(name, index) for name, index in bindings.feeds if name in which.feed]
        after = self._feed(frame, late, which) if late else ()
        program = bindings.backward(part, self.store.begins_gradients())
        read = self.loans.complete(version, which.mini_batch)
        self._run(program, read, frame, after, queue=which.queue, leaving=leaving)
        self._account(part + 1, which, frame, version)
        self.frames.let_go(frame, bindings, part + 1)

    def _evaluate(self, which: Pass) -> None:
        """Run a forward in eval mode, on the present weights."""
        binding = self._binding.forwards[which.forwards][which.samples]
        frame = self.frames.of(which.microbatch)
        after = self._feed(frame, binding.feeds, which)
        version = self._run(binding, self.weights.present, frame, after, queue=which.queue)
        self._account(which.forwards, which, frame, version)
        self.results.keep(which.microbatch, frame, binding if which.keeps_output else None)

    def update(self, rates: Mapping[str, float], grad_scale: float) -> None:
        """Apply the gradients with these learning rates, which have the names of scalars."""
        binding = self._binding.update
        if binding is None:
            return
        step = float(self.weights.number + 1)
        self._put_scalars({**rates, "step": step, "grad_scale": grad_scale})
        self.store.make_gradients()
        present = self.weights.present
        if self.weights.disposable:
            self._run(binding, present, [], donate=binding.parameters)
            self.weights.updated(present)
        else:
            self.weights.updated(self._run(binding, present, [], into=list(present)))
            self.loans.drop(present)
        self.store.drop_late_gradients()
        self.memory.updated(self.weights.live(present))
        self._before = None

    def drop_gradients(self) -> None:
        """Zero the gradients, as an update does, and change nothing else."""
        self.store.zero_gradients()
        self._before = None

    def undo(self) -> None:
        """Drop the gradients, and restore the buffers from before this mini-batch."""
        if self._before is not None:
            self.store.restore(self._before)
        self.drop_gradients()

    def square(self, grad_scale: float) -> float:
        """Return the sum of the squares of this stage's scaled gradients or, without a clip, the
        sum of the gradients."""
        binding = self._binding.norm
        if binding is None:
            return 0.0
        self.store.make_gradients()
        self._put_scalars({"grad_scale": grad_scale})
        frame = self.frames.empty()
        self._run(binding, self.weights.present, frame)
        (place,), (slot,) = binding.targets, binding.program.outputs
        return float(self.store.download(slot, frame[place.entry]))

    def on_host(self, tensors: Sequence[Buffer | Array]) -> list[Array]:
        """Return the tensors as arrays; arrays are not copied."""
        arrays = []
        for tensor in tensors:
            if not isinstance(tensor, np.ndarray):
                array = np.empty(tensor.shape, host_dtype(tensor.dtype))
                self.device.download(tensor, array).wait()
                tensor = array
            arrays.append(tensor)
        return arrays

    def release(self, microbatch: int) -> None:
        self.frames.release(microbatch)
        self.memory.forget(microbatch)

    def get(self, key: Key) -> Array:
        return self.store.get(key)

    def put(self, key: Key, value: Array) -> None:
        if (buffer := self.store.put(key, value)) is not None:
            self.memory.stay(buffer, versioned=key in self._binding.trained)

    def _compile(self, bindings: Sequence[Binding]) -> None:
        programs = [binding.program for binding in bindings]
        executables = compile_programs(self.device, programs, self._meet)
        for binding, executable in zip(bindings, executables, strict=True):
            self._executables[id(binding)] = executable

    def _run(
        self,
        binding: Binding,
        params: Version,
        frame: Entries,
        after: Sequence[Event] = (),
        *,
        donate: frozenset[int] = frozenset(),
        into: Version | None = None,
        queue: int = 0,
        leaving: Leaving | None = None,
    ) -> Version:
        """Run a program on `params`. Write new parameters into the version `into`, or else into
        `params`, and return that version."""
        tables = (params, self.store.entries, frame)
        inputs = [tables[table][index] for table, index in binding.sources]
        if id(binding) not in self._executables:  # only some trainings use this program
            self._compile([binding])
        executable = self._executables[id(binding)]
        slots, donate = binding.program.outputs, binding.donate | donate
        try:
            ran = executable.run(inputs, donate, after, queue)
            outputs, event, chunks = check_ran(self.device, ran, len(slots))
            if leaving is not None and chunks:
                leaving(slots, outputs, event, chunks)
            event.wait()
        except Exception as error:
            if isinstance(error, EdgeClosedError) or has_sums(binding.program):
                raise
            graph = of_one_replica(binding.program.graph)
            raise run_error(self.device, graph, inputs, donate, error) from error
        if self._keep.check_finite:
            _find_nonfinite(self, slots, outputs)
        version = params if into is None else into
        tables = (version, self.store.entries, frame)
        for (table, index), buffer in zip(binding.targets, outputs, strict=True):
            tables[table][index] = buffer
        return version

    def _predict(self, version: Version, ahead: float) -> Version:
        """Return the weights expected after `ahead` more updates."""
        assert self._binding.predict is not None
        self._put_scalars({"ahead": ahead})
        return self._run(self._binding.predict, version, [], into=list(version))

    def _put_scalars(self, scalars: Mapping[str, float]) -> None:
        for buffer in self.store.put_scalars(scalars):
            self.memory.stay(buffer, versioned=False)

    def _account(self, part: int | Content, which: Pass, frame: Entries, version: Version) -> None:
        awaited, live = self._binding.awaited(which.samples, part), self.weights.live(version)
        self.memory.passed(which.microbatch, (which.samples, part), frame, awaited, live)

    def _feed(self, frame: Entries, feeds: Sequence[tuple[str, int]], which: Pass) -> list[Event]:
        """Begin to upload the leaves of the batch that a pass reads."""
        values = [(index, which.feed[name]) for name, index in feeds]
        if self._rng is not None:  # a model may also draw numbers in evaluation
            values.append((self._rng, np.asarray(which.rng, np.int64)))
        events = []
        for index, value in values:
            frame[index], event = upload(self.device, value)
            events.append(event)
        return events

    def _loss_tangent(self, value: float) -> Buffer:
        if value not in self._tangents:
            dtype = host_dtype(self._binding.slots[TANGENT, LOSS].dtype)
            self._tangents[value] = self.store.upload(np.asarray(value, dtype))
        return self._tangents[value]


def _find_nonfinite(stage: Stage, slots: Sequence[Slot], outputs: Sequence[Buffer]) -> None:
    """Raise `HetpipeError` for the first output that contains inf or NaN."""
    for slot, buffer in zip(slots, outputs, strict=True):
        if slot.role in CHECKED and not np.isfinite(stage.store.download(slot, buffer)).all():
            raise HetpipeError(
                f"{slot.role} {slot.name!r} of stage {stage.number} is the first tensor that is "
                "not finite"
            )
