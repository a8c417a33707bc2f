"""Measures the layers of a network on a device, inside the device's own worker.

The network is cut after every layer. Of the layers of one pattern (`hetpipe.profile.patterns`),
only the first is compiled and run. A round walks forward through the network, and then backward, as
a micro-batch does. A layer that the round skips would have used the caches. So the round reads and
writes as many other bytes instead, at most `MOST_STIRRED`. A tensor that a skipped layer would have
passed on is written just before its reader runs, so a layer finds its input in the caches, as in
training. Each pattern has its own weights. Rounds do not change weights, so a backend may keep
packed weights, as it does between two updates.

The controller calls `prepare`, `rounds`, `updates` and `release` on all workers at once
(`hetpipe.profile.rounds`), and estimates costs from the times.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from hetpipe.capture.program import (
    CONSTANT,
    COUNT,
    CUT,
    INPUT,
    LOSS,
    OUTPUT,
    SAVED,
    TANGENT,
    Program,
    Slot,
    StageGraphs,
)
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.profile import clock
from hetpipe.profile.patterns import Network
from hetpipe.profile.probing import Stirrer
from hetpipe.sdk.backend import Buffer, Device, Executable
from hetpipe.sdk.graph import of_one_replica
from hetpipe.sdk.host.validation import check_ran, upload
from hetpipe.sdk.support import require_support
from hetpipe.worker.blame import compile_graphs, run_error
from hetpipe.worker.emulation import OWN_SPEED, Emulation

Environment = dict[tuple[str, str], Buffer]
Place = tuple[int, int, int]
"""The key of a time: micro-batch size, pattern and pass. An update has the size 0."""

FORWARD, BACKWARD, UPDATE = range(3)
RULES = 7  # version of the measurement: a cache entry of another version is not used
ROUNDS = 12  # rounds of `smallest`
MOST_STIRRED = 32 << 20  # bytes: more than most caches hold


@dataclass
class Times:
    """The times that a worker measured, by `Place`, and the seconds of each whole round."""

    times_s: dict[Place, list[float]] = field(default_factory=lambda: defaultdict(list))
    rounds_s: list[float] = field(default_factory=list)
    runs: int = 0


@dataclass(frozen=True)
class Prepared:
    """Why patterns cannot run, by pattern; and how many graphs were compiled and run."""

    refused: dict[int, str]
    compilations: int
    runs: int


_own = threading.local()
"""The session of a worker. It is thread-local: all calls of a worker come on one thread, and
workers may share a process."""


def prepare(
    device: Device, network: Network, sizes: Sequence[int], emulation: Emulation, seed: int = 0
) -> Prepared:
    """Compile the patterns and run each once, since some runtimes compile at the first run.

    A speed below 1 is emulated only after these first runs.
    """
    session = _own.session = Session(device, network, seed=seed)
    measured = Times()
    for size in sizes:
        session.walk(size, session.able, measured)
    session.update(measured)
    session.emulation = emulation
    return Prepared(session.refused, session.compilations, measured.runs)


def rounds(device: Device, active: Mapping[int, Sequence[int]], least_s: float, most: int) -> Times:
    """Run rounds until `least_s` seconds are over, but at least one round and at most `most`.

    A round walks through the network once for each size, with the `active` patterns of that size.
    """
    session: Session = _own.session
    measured = Times()
    begin_s = time.perf_counter()
    while not measured.rounds_s or (
        len(measured.rounds_s) < most and time.perf_counter() - begin_s < least_s
    ):
        start_s = time.perf_counter()
        for size, patterns in active.items():
            session.walk(size, frozenset(patterns), measured)
        measured.rounds_s.append(time.perf_counter() - start_s)
    return measured


def updates(device: Device, size: int, least: int, least_s: float) -> tuple[Times, Times]:
    """Run updates and then two walks, `least` times or more, for `least_s` seconds or more.

    Returns the times of updates and first walks, and the times of second walks. The passes of a
    first walk read new weights, which are not in the caches and must be packed again. This extra
    time does not depend on the size of the micro-batch, so a small size shows it best.
    """
    session: Session = _own.session
    after, usual = Times(), Times()
    session.walk(size, session.able, Times())  # does not count: brings its data into the caches
    begin_s = time.perf_counter()
    while len(usual.rounds_s) < least or time.perf_counter() - begin_s < least_s:
        start_s = time.perf_counter()
        session.update(after)
        session.walk(size, session.able, after)
        session.walk(size, session.able, usual)
        usual.rounds_s.append(time.perf_counter() - start_s)
    return after, usual


def release(device: Device) -> None:
    """Free everything that was prepared; another worker may need the device's memory."""
    del _own.session
    device.trim()


def smallest(device: Device, stage: StageGraphs, emulation: Emulation) -> list[float] | str:
    """Return the seconds of each forward of a stage for one sample, or why it cannot run."""
    session, measured = Session(device, Network.of([stage]), emulation), Times()
    if session.refused:
        return session.refused[0]
    for _ in range(ROUNDS + 1):
        session.walk(1, session.able, measured)
    return measured.times_s[1, 0, FORWARD][1:]  # the first run warms up


class Session:
    """The patterns of a network, compiled, with the values that their passes read."""

    def __init__(
        self, device: Device, network: Network, emulation: Emulation = OWN_SPEED, seed: int = 0
    ) -> None:
        self._device = device
        self._network = network
        self.emulation = emulation
        self._rng = np.random.default_rng(seed)
        self._firsts = network.firsts
        self._stirrer = Stirrer(device)
        self._kept: Environment = {}  # parameters, and all other buffers that outlast a walk
        self._passing: dict[int, Environment] = defaultdict(dict)  # tensors between layers, by size
        self._saved: dict[tuple[int, int], Environment] = defaultdict(dict)
        self._examples: dict[tuple[int, tuple[str, str]], Any] = {}  # on the host
        self._programs: dict[Place, tuple[Program, Executable]] = {}
        self.refused: dict[int, str] = {}
        programs: dict[Place, Program] = {}
        graphs: dict[Place, fx.GraphModule] = {}
        for pattern, stage in enumerate(network.patterns):
            own = _programs(pattern, stage)
            alone = {place: of_one_replica(program.graph) for place, program in own.items()}
            try:
                for graph in alone.values():
                    require_support(device, graph)
            except UnsupportedOperatorError as error:
                self.refused[pattern] = str(error)
            else:
                programs |= own
                graphs |= alone
        executables = compile_graphs(device, list(graphs.values()))
        self.compilations = len(executables)
        for (place, program), executable in zip(programs.items(), executables, strict=True):
            self._programs[place] = program, executable
        self.able = frozenset(range(len(network.patterns))) - self.refused.keys()

    def walk(self, size: int, active: frozenset[int], measured: Times) -> None:
        """Run the `active` patterns forward and then backward, for one micro-batch."""
        order = range(len(self._network.layers))
        fresh: set[tuple[str, str]] = set()  # tensors written in this walk
        skipped = 0  # bytes of the layers skipped since the last layer that ran
        for which, layers in ((FORWARD, order), (BACKWARD, reversed(order))):
            begin, ahead_s = clock.begin(), 0.0
            for layer in layers:
                pattern = self._network.layers[layer]
                if pattern in active and self._firsts[pattern] == layer:
                    self._stirrer.pass_over(min(skipped, MOST_STIRRED))
                    ahead_s += self._run((size, pattern, which), size, measured, fresh)
                    skipped = 0
                else:
                    skipped += self._network.nbytes(pattern, size)
            clock.catch_up(begin, clock.now_s() - begin.clock_s + ahead_s, self.emulation)

    def update(self, measured: Times) -> None:
        """Run the updates of all patterns."""
        begin, ahead_s = clock.begin(), 0.0
        for pattern in sorted(self.able):
            ahead_s += self._run((0, pattern, UPDATE), 0, measured, set())
        clock.catch_up(begin, clock.now_s() - begin.clock_s + ahead_s, self.emulation)

    def _run(self, place: Place, size: int, measured: Times, fresh: set[tuple[str, str]]) -> float:
        """Run a pass; return the seconds still to wait for the emulated speed."""
        if place not in self._programs:
            return 0.0
        program, executable = self._programs[place]
        _, pattern, which = place
        inputs = [self._input(slot, size, pattern, fresh) for slot in program.inputs]
        donate = frozenset(
            i for i, slot in enumerate(program.inputs) if which > 0 and _donated(slot, program)
        )
        begin = clock.begin()
        try:
            ran = executable.run(inputs, donate)
            outputs, event, _ = check_ran(self._device, ran, len(program.outputs))
            event.wait()
        except Exception as error:
            graph = of_one_replica(program.graph)
            raise run_error(self._device, graph, inputs, donate, error) from error
        time_s = clock.since_s(begin, self.emulation)
        ahead_s = time_s - (clock.now_s() - begin.clock_s)
        measured.times_s[place].append(time_s)
        measured.runs += 1
        for slot, buffer in zip(program.outputs, outputs, strict=True):
            self._room(slot, size, pattern)[slot.key] = buffer
            fresh.add(slot.key)
        return ahead_s

    def _input(self, slot: Slot, size: int, pattern: int, fresh: set[tuple[str, str]]) -> Buffer:
        """Return the buffer of an input; if no pass has written it, fill it with made-up values."""
        room = self._room(slot, size, pattern)
        handed = slot.role in _HANDED and slot.key not in fresh
        if handed or slot.key not in room:
            example = self._examples.get((size, slot.key))
            if example is None:
                example = _example(slot, self._network.patterns[pattern].constants, self._rng)
            if handed:
                self._examples[size, slot.key] = example
            room[slot.key], event = upload(self._device, example)
            event.wait()
        fresh.add(slot.key)
        return room[slot.key]

    def _room(self, slot: Slot, size: int, pattern: int) -> Environment:
        if slot.role == SAVED:  # their names are unique only within a layer
            return self._saved[size, pattern]
        return self._passing[size] if slot.role in _PASSING else self._kept


_HANDED = (CUT, TANGENT, INPUT)  # a neighbour or the controller hands these to a layer
_PASSING = (*_HANDED, LOSS, COUNT, OUTPUT)


def _programs(pattern: int, stage: StageGraphs) -> dict[Place, Program]:
    programs: dict[Place, Program | None] = {(0, pattern, UPDATE): stage.update}
    for size, passes in stage.passes.items():
        programs[size, pattern, FORWARD] = passes.forward
        programs[size, pattern, BACKWARD] = passes.backward
    return {place: program for place, program in programs.items() if program is not None}


def _donated(slot: Slot, program: Program) -> bool:
    """Return whether the program returns a new value of this parameter, gradient or state."""
    return slot.role in ("param", "grad", "state") and any(
        slot.key == out.key for out in program.outputs
    )


def _example(slot: Slot, constants: Mapping[str, Any], rng: np.random.Generator) -> Any:
    if slot.role == CONSTANT:
        return np.asarray(constants[slot.name], order="C")  # unlike ascontiguousarray, keeps 0-d
    if slot.dtype in ("float32", "float64", "float16"):
        if slot.role in ("state", "grad", "scalar"):
            return np.zeros(slot.shape, slot.dtype)
        return (rng.standard_normal(slot.shape) * 0.1).astype(slot.dtype)
    return np.zeros(slot.shape, slot.dtype)
