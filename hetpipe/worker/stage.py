"""A loaded stage: compiled programs and the buffers that they read and write.

Every slot has a place, (table, index), found once at load. A run picks its inputs from three
tables, the parameters of the policy's choice, the store, and the micro-batch's frame, and files its
outputs there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetpipe.capture.program import (
    BUFFER,
    CONSTANT,
    COUNT,
    CUT,
    GRAD,
    INPUT,
    LOSS,
    PARAM,
    RNG,
    SCALAR,
    STATE,
    TANGENT,
    PassPrograms,
    Program,
    Slot,
    StageGraphs,
)  # fmt: skip
from hetpipe.errors import HetpipeError
from hetpipe.sdk.backend import Buffer, Device, Event, Executable
from hetpipe.wire.messages import Keep
from hetpipe.wire.pieces import Leaving
from hetpipe.wire.wire import Array, Layout, host_dtype
from hetpipe.worker.divided import Meet, compile_program
from hetpipe.worker.memory import Memory, nbytes_of
from hetpipe.worker.weights import Predicted, Version, make_weights

PARAMS, STORE, FRAME = 0, 1, 2
CHECKED = (CUT, LOSS, TANGENT, GRAD, PARAM)
"""What leaves a pass or an update and must be finite, where that is looked at."""
TABLE_OF = dict.fromkeys((BUFFER, CONSTANT, GRAD, STATE, SCALAR), STORE) | {PARAM: PARAMS}

Key = tuple[str, str]
Place = tuple[int, int]
Frame = list[Any]


@dataclass(frozen=True)
class _Bound:
    """An executable, and the places of its inputs and outputs."""

    executable: Executable
    sources: tuple[Place, ...]
    targets: tuple[Place, ...]
    donate: frozenset[int]  # inputs that every run may overwrite
    parameters: frozenset[int]  # inputs that are parameters
    slots: tuple[Slot, ...]  # of the outputs


@dataclass(frozen=True)
class _Passes:
    """The passes for one micro-batch size; all numbers are indices in the frame."""

    forward: _Bound
    backwards: tuple[_Bound, ...]  # the whole, or its two halves; none without a gradient
    feeds: tuple[tuple[str, int], ...]  # name of an INPUT, its index
    kept: frozenset[int]  # what any backward reads
    awaited: tuple[frozenset[int], ...]  # what backwards read behind each pass
    dead_after_forward: tuple[int, ...]
    dead_after_backward: tuple[tuple[int, ...], ...]  # behind each


class Stage:
    """One stage on one device; holds parameters, buffers, gradients and optimizer state."""

    def __init__(
        self,
        device: Device,
        graphs: StageGraphs,
        values: Mapping[str, Array],
        state_init: Callable[..., Array],
        keep: Keep,
        meet: Meet | None = None,
    ) -> None:
        self.device = device
        self._meet = meet
        self._slots = {slot.key: slot for program in _programs(graphs) for slot in _slots(program)}
        self._places: dict[Key, Place] = {}
        self._tables: list[list[Any]] = [[], [], []]
        for key, slot in self._slots.items():
            table = self._tables[TABLE_OF.get(slot.role, FRAME)]
            self._places[key] = (TABLE_OF.get(slot.role, FRAME), len(table))
            table.append(self._initial(slot, graphs, values, state_init))
        predict = None if graphs.predict is None else self._predict
        self.weights = make_weights(keep, graphs.stage, self._tables[PARAMS], predict)
        self._store = self._tables[STORE]
        self._frames: dict[int, Frame] = {}
        places = [place for key, place in self._places.items() if key[0] == TANGENT]
        self._tangent_places = _frame_indices(places)
        self._passes = {samples: self._bind_passes(p) for samples, p in graphs.passes.items()}
        self._evaluations = {
            samples: self._bind_evaluation(program)
            for samples, program in graphs.evaluation.items()
        }
        self._between: dict[int, Version] = {}  # weights of a backward that is half done
        self._update = None if graphs.update is None else self._bind(graphs.update, (GRAD, STATE))
        predicts = isinstance(self.weights, Predicted) and graphs.predict is not None
        self._predictor = self._bind(graphs.predict) if predicts and graphs.predict else None
        self._loss, self._count, self._rng = (self._index_of(r) for r in (LOSS, COUNT, RNG))
        self._results: dict[str, dict[int, Buffer | float]] = {LOSS: {}, COUNT: {}}
        places = [place for key, place in self._places.items() if key[0] == BUFFER]
        self._buffer_indices = [index for table, index in places if table == STORE]
        self._buffers_before: list[tuple[int, Buffer]] | None = None  # at the last update
        self._undoes = keep.policy.flushes
        self._scalars: dict[str, float] = {}
        self._tangents: dict[float, Buffer] = {}
        self.memory = self._make_memory()
        self._graphs = graphs
        self._check_finite = keep.check_finite
        self._norm: _Bound | None = None  # compiled when it is first asked for
        if self.weights.number:
            self._put_scalars({"lr": keep.lr, "step": float(self.weights.number)})

    @property
    def has_loss(self) -> bool:
        """Whether it ends with the loss."""
        return self._loss is not None

    @property
    def has_count(self) -> bool:
        """Whether the loss is a sum, with a count of its own."""
        return self._count is not None

    def forward(
        self,
        microbatch: int,
        samples: int,
        feed: Mapping[str, Array],
        rng: tuple[int, int, int],
        lag: int = 0,
        ahead: int = 0,
        queue: int = 0,
        leaving: Leaving | None = None,
    ) -> None:
        """Run the forward of `microbatch`; `rng` is (seed, step, index of the first sample).

        `lag` and `ahead` choose the version of the weights (`hetpipe.worker.weights`). On another
        thread and `queue`, a backward of another micro-batch may run meanwhile: frames are by
        micro-batch, gradients are written by backwards and buffers by forwards alone. `leaving` is
        told of the outputs when they begin to be made.
        """
        passes = self._passes[samples]
        frame = self._frame(microbatch)
        after = [self._feed(frame, index, feed[name]) for name, index in passes.feeds]
        if self._rng is not None:
            after.append(self._feed(frame, self._rng, np.asarray(rng, np.int64)))
        version = self.weights.forward(microbatch, lag, ahead)
        if self._buffers_before is None and self._undoes:
            self._buffers_before = [(index, self._store[index]) for index in self._buffer_indices]
        self._run(passes.forward, version, frame, after, queue=queue, leaving=leaving)
        self._account(0, microbatch, samples, version)
        self._keep_results(microbatch, frame)
        for index in passes.dead_after_forward:
            frame[index] = None

    def backward(
        self,
        microbatch: int,
        samples: int,
        loss_tangent: float,
        queue: int = 0,
        leaving: Leaving | None = None,
    ) -> None:
        """Run the backward of `microbatch`, add to the gradients, drop what was kept for it."""
        version = self.weights.backward(microbatch)
        self._backward(0, microbatch, samples, loss_tangent, version, queue, leaving)

    def backward_input(
        self,
        microbatch: int,
        samples: int,
        loss_tangent: float,
        queue: int = 0,
        leaving: Leaving | None = None,
    ) -> None:
        """The first half of the backward: gradients of what the stage was given."""
        self._between[microbatch] = version = self.weights.backward(microbatch)
        self._backward(0, microbatch, samples, loss_tangent, version, queue, leaving)

    def backward_weight(
        self, microbatch: int, samples: int, loss_tangent: float, queue: int = 0
    ) -> None:
        """The second half, with the same weights: add to the gradients."""
        version = self._between.pop(microbatch)
        self._backward(1, microbatch, samples, loss_tangent, version, queue)

    def _backward(
        self,
        part: int,
        microbatch: int,
        samples: int,
        loss_tangent: float,
        version: Version,
        queue: int,
        leaving: Leaving | None = None,
    ) -> None:
        passes = self._passes[samples]
        if not passes.backwards:
            return
        frame = self._frames[microbatch]
        if (place := self._places.get((TANGENT, LOSS))) is not None:
            frame[place[1]] = self._loss_tangent(loss_tangent)
        self._run(passes.backwards[part], version, frame, queue=queue, leaving=leaving)
        self._account(part + 1, microbatch, samples, version)
        for index in passes.dead_after_backward[part]:
            frame[index] = None

    def evaluate(
        self, microbatch: int, samples: int, feed: Mapping[str, Array], queue: int = 0
    ) -> None:
        """Run the forward of `microbatch` in evaluation, on the present weights."""
        bound, feeds = self._evaluations[samples]
        frame = self._frame(microbatch)
        after = [self._feed(frame, index, feed[name]) for name, index in feeds]
        self._run(bound, self.weights.present, frame, after, queue=queue)
        self._keep_results(microbatch, frame)

    def _account(self, which: int, microbatch: int, samples: int, version: Version) -> None:
        frame, awaited = self._frames[microbatch], self._passes[samples].awaited[which]
        live = self.weights.live(version)
        self.memory.passed(microbatch, (samples, which), frame, awaited, live)

    def _make_memory(self) -> Memory:
        present = self.weights.present
        targets = self._update.targets if self._update is not None else ()
        trained = [present[index] for table, index in targets if table == PARAMS]
        return Memory([*present, *self._store], nbytes_of(trained))

    def _keep_results(self, microbatch: int, frame: Frame) -> None:
        for role, index in ((LOSS, self._loss), (COUNT, self._count)):
            if index is not None:
                self._results[role][microbatch] = frame[index]

    def update(self, lr: float, grad_scale: float) -> None:
        """Apply the optimizer."""
        if self._update is None:
            return
        step = float(self.weights.number + 1)
        self._put_scalars({"lr": lr, "step": step, "grad_scale": grad_scale})
        present = self.weights.present
        if self.weights.disposable:
            self._run(self._update, present, [], donate=self._update.parameters)
            self.weights.updated(present)
        else:
            self.weights.updated(self._run(self._update, present, [], into=list(present)))
        self.memory.updated(self.weights.live(present))
        self._buffers_before = None

    def undo(self) -> None:
        """Drop the gradients, and take back what forwards since the last update made of buffers."""
        for index, buffer in self._buffers_before or ():
            self._store[index] = buffer
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Zero them, as an update does, and leave all else as it is."""
        for name in self.names(GRAD):
            slot = self._slots[GRAD, name]
            self.put(slot.key, np.zeros(slot.shape, host_dtype(slot.dtype)))
        self._buffers_before = None

    def square(self, grad_scale: float) -> float:
        """The sum of squares of the scaled gradients that this stage applies."""
        if self._graphs.norm is None:
            return 0.0
        if self._norm is None:
            self._norm = self._bind(self._graphs.norm)
        self._put_scalars({"grad_scale": grad_scale})
        frame: Frame = [None] * len(self._tables[FRAME])
        self._run(self._norm, self.weights.present, frame)
        slot = self._graphs.norm.outputs[0]
        return float(self._download(slot, frame[self._places[slot.key][1]]))

    def _predict(self, version: Version, ahead: float) -> Version:
        """The weights expected after `ahead` more updates."""
        assert self._predictor is not None
        self._put_scalars({"ahead": ahead})
        return self._run(self._predictor, version, [], into=list(version))

    def _put_scalars(self, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            slot = self._slots.get((SCALAR, name))
            if slot is not None and self._scalars.get(name) != value:
                self.put(slot.key, np.asarray(value, host_dtype(slot.dtype)))
                self._scalars[name] = value

    def results(self, role: str) -> tuple[float, ...] | None:
        """Losses or counts of all micro-batches since the last call, in their order."""
        values = self._downloaded(role)
        self._results[role] = {}
        return tuple(values[m] for m in sorted(values)) or None

    def losses_are_finite(self) -> bool:
        """Whether those are that `results` would return."""
        return all(map(math.isfinite, self._downloaded(LOSS).values()))

    def _downloaded(self, role: str) -> dict[int, float]:
        """Losses or counts by micro-batch, each downloaded once."""
        results = self._results[role]
        slot = next((slot for slot in self._slots.values() if slot.role == role), None)
        values: dict[int, float] = {}
        for microbatch, result in results.items():
            if not isinstance(result, float):
                assert slot is not None
                result = float(self._download(slot, result))
            values[microbatch] = result
        results.update(values)
        return values

    def arrive(self, microbatch: int, layout: Layout, buffers: Sequence[Buffer]) -> None:
        """File tensors that came from a neighbour for `microbatch`."""
        frame = self._frame(microbatch)
        for slot, buffer in zip(layout, buffers, strict=True):
            frame[self._places[slot.key][1]] = buffer

    def depart(self, microbatch: int, samples: int, layout: Layout) -> list[Buffer]:
        """Tensors of `microbatch` for a neighbour; those that no backward reads are let go."""
        frame = self._frames[microbatch]
        kept = self._passes[samples].kept if samples in self._passes else frozenset()
        indices = [self._places[slot.key][1] for slot in layout]
        buffers = [frame[index] for index in indices]
        for index in indices:
            if index not in kept:
                frame[index] = None
        return buffers

    def on_host(self, tensors: Sequence[Buffer | Array]) -> list[Array]:
        """Their values; what is on the host already stays."""
        found = []
        for tensor in tensors:
            if not isinstance(tensor, np.ndarray):
                array = np.empty(tensor.shape, host_dtype(tensor.dtype))
                self.device.download(tensor, array).wait()
                tensor = array
            found.append(tensor)
        return found

    def release(self, microbatch: int) -> None:
        """Forget `microbatch`."""
        self._frames.pop(microbatch, None)
        self.memory.forget(microbatch)

    def names(self, role: str) -> list[str]:
        """Names of the slots of a role."""
        return [slot.name for slot in self._slots.values() if slot.role == role]

    def get(self, key: Key) -> Array:
        """The present value of a parameter, buffer, gradient or state, on the host."""
        table, index = self._places[key]
        buffers = self.weights.present if table == PARAMS else self._store
        return self._download(self._slots[key], buffers[index])

    def put(self, key: Key, value: Array) -> None:
        """Replace it."""
        table, index = self._places[key]
        buffers = self.weights.present if table == PARAMS else self._store
        is_new = buffers[index] is None
        buffers[index] = self._upload(value)
        if is_new:
            self.memory.stay(buffers[index])

    def _run(
        self,
        bound: _Bound,
        params: Version,
        frame: Frame,
        after: Sequence[Event] = (),
        *,
        donate: frozenset[int] = frozenset(),
        into: Version | None = None,
        queue: int = 0,
        leaving: Leaving | None = None,
    ) -> Version:
        """Run on a version of the parameters; those that it makes go `into` another, if given."""
        tables = (params, self._store, frame)
        inputs = [tables[table][index] for table, index in bound.sources]
        outputs, event, chunks = bound.executable.run(inputs, bound.donate | donate, after, queue)
        if leaving is not None and chunks:
            leaving(bound.slots, outputs, event, chunks)
        event.wait()
        if self._check_finite:
            self._find_nonfinite(bound, outputs)
        made = params if into is None else into
        tables = (made, self._store, frame)
        for (table, index), buffer in zip(bound.targets, outputs, strict=True):
            tables[table][index] = buffer
        return made

    def _find_nonfinite(self, bound: _Bound, outputs: Sequence[Buffer]) -> None:
        """Raises `HetpipeError` for the first tensor that leaves a pass with inf or NaN in it."""
        for slot, buffer in zip(bound.slots, outputs, strict=True):
            if slot.role in CHECKED and not np.isfinite(self._download(slot, buffer)).all():
                raise HetpipeError(
                    f"{slot.role} {slot.name!r} of stage {self._graphs.stage} is not finite: the "
                    "first tensor that is not"
                )

    def _bind(self, program: Program, donated: Sequence[str] = ()) -> _Bound:
        return _Bound(
            compile_program(self.device, program, self._meet),
            tuple(self._places[slot.key] for slot in program.inputs),
            tuple(self._places[slot.key] for slot in program.outputs),
            frozenset(i for i, slot in enumerate(program.inputs) if slot.role in donated),
            frozenset(i for i, slot in enumerate(program.inputs) if slot.role == PARAM),
            program.outputs,
        )

    def _bind_passes(self, passes: PassPrograms) -> _Passes:
        whole = (passes.backward,) if passes.backward is not None else ()
        programs = whole if passes.halves is None else passes.halves
        forward = self._bind(passes.forward)
        backwards = tuple(self._bind(program, (GRAD,)) for program in programs)
        read, made = _frame_indices(forward.sources), _frame_indices(forward.targets)
        sent_back = _frame_indices(place for part in backwards for place in part.targets)
        reads = [_frame_indices(part.sources) for part in backwards]
        kept = frozenset().union(*reads)
        everything = read | made | kept | sent_back
        leaving = sent_back & self._tangent_places  # they may still have to be sent
        later = [frozenset().union(*reads[part + 1 :]) for part in range(len(reads))]
        return _Passes(
            forward,
            backwards,
            self._feeds_of(passes.forward, *whole),
            kept,
            (kept, *later),
            tuple(read - kept - made),
            tuple(tuple(everything - needed - leaving) for needed in later),
        )

    def _bind_evaluation(self, program: Program) -> tuple[_Bound, tuple[tuple[str, int], ...]]:
        return self._bind(program), self._feeds_of(program)

    def _feeds_of(self, *programs: Program) -> tuple[tuple[str, int], ...]:
        slots = [slot for program in programs for slot in program.inputs if slot.role == INPUT]
        return tuple({slot.name: self._places[slot.key][1] for slot in slots}.items())

    def _frame(self, microbatch: int) -> Frame:
        frame = self._frames.get(microbatch)
        if frame is None:
            frame = self._frames[microbatch] = [None] * len(self._tables[FRAME])
        return frame

    def _feed(self, frame: Frame, index: int, value: Array) -> Event:
        frame[index], event = self.device.upload(value)
        return event

    def _loss_tangent(self, value: float) -> Buffer:
        if value not in self._tangents:
            dtype = host_dtype(self._slots[TANGENT, LOSS].dtype)
            self._tangents[value] = self._upload(np.asarray(value, dtype))
        return self._tangents[value]

    def _index_of(self, role: str) -> int | None:
        return next((self._places[k][1] for k, s in self._slots.items() if s.role == role), None)

    def _initial(
        self,
        slot: Slot,
        graphs: StageGraphs,
        values: Mapping[str, Array],
        state_init: Callable[..., Array],
    ) -> Buffer | None:
        if slot.role in (PARAM, BUFFER):
            return self._upload(values[slot.name])
        if slot.role == CONSTANT:
            return self._upload(graphs.constants[slot.name])
        if slot.role in (GRAD, STATE):
            make = np.zeros if slot.role == GRAD else state_init
            return self._upload(make(slot.shape, host_dtype(slot.dtype)))
        return None

    def _upload(self, value: Array) -> Buffer:
        buffer, event = self.device.upload(np.asarray(value, order="C"))
        event.wait()
        return buffer

    def _download(self, slot: Slot, buffer: Buffer) -> Array:
        array = np.empty(slot.shape, host_dtype(slot.dtype))
        self.device.download(buffer, array).wait()
        return array


def _programs(graphs: StageGraphs) -> list[Program]:
    passes = [
        p
        for pair in graphs.passes.values()
        for p in (pair.forward, pair.backward, *(pair.halves or ()))
    ]
    more = (graphs.update, graphs.predict, graphs.norm)
    known = (*passes, *more, *graphs.evaluation.values())
    return [program for program in known if program is not None]


def _slots(program: Program) -> tuple[Slot, ...]:
    return (*program.inputs, *program.outputs)


def _frame_indices(places: Iterable[Place]) -> frozenset[int]:
    return frozenset(index for table, index in places if table == FRAME)
