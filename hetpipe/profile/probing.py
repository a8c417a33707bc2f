"""Probes run short fixed programs on all devices of a crew at the same time, as a training does.

The programs are graphs, as layers are: a square matrix product, and an elementwise pass over some
MiB. The first probe of a device enlarges the programs until a run takes `ENOUGH_S`. Later probes of
the device have the same sizes.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from hetpipe.cost.probe import Probe
from hetpipe.crew.crew import Crew
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.profile import clock
from hetpipe.profile.clock import ClockWarning, Samples
from hetpipe.sdk.backend import Buffer, Device, Executable
from hetpipe.sdk.graph import canonical, dump_graph
from hetpipe.sdk.host.validation import check_ran, upload
from hetpipe.worker.emulation import Emulation

PIECE = 1 << 20  # bytes
PIECES = 32

Shape = tuple[int, ...]


def compile_operator(device: Device, operator: Any, count: int, shape: Shape) -> Executable | None:
    """Compile an operator with `count` float32 inputs of `shape`, and a result of `shape`.

    Returns None if the device lacks the operator.
    """
    try:
        return device.compile(graph_of(operator, count, shape))
    except UnsupportedOperatorError:
        return None


def graph_of(operator: Any, count: int, shape: Shape) -> fx.GraphModule:
    """Return the graph of an operator on `count` float32 tensors, with a result of their shape.

    The graph is not traced, because workers may be threads, and only one thread may trace. Torch
    does not infer the result's shape, because that would import its compilers, which takes 2 s.
    """
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{index}") for index in range(count)]
    call = graph.call_function(operator, tuple(inputs))
    for node in (*inputs, call):
        node.meta["val"] = torch.empty(shape, device="meta")
    graph.output((call,))
    return canonical(graph)


def filled_buffer(device: Device, shape: Shape) -> Buffer:
    """Return a buffer on the device, filled with small numbers."""
    buffer, event = upload(device, np.full(shape, 0.5, np.float32))
    event.wait()
    return buffer


class Stirrer:
    """Reads and writes bytes on a device, so that they replace other bytes in its caches."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._executable: Executable | None = None
        self._ring: list[Buffer] = []
        self._next = 0

    def pass_over(self, nbytes: int) -> None:
        """Read and write `nbytes`, rounded down to whole pieces."""
        for _ in range(nbytes // PIECE):
            if not self._ring:
                shape = (PIECE // 4,)
                self._executable = compile_operator(
                    self._device, torch.ops.aten.neg.default, 1, shape
                )
                self._ring = [filled_buffer(self._device, shape) for _ in range(PIECES)]
            if self._executable is None:  # without this operator, the caches do not change
                return
            ran = self._executable.run([self._ring[self._next]])
            _, event, _ = check_ran(self._device, ran, 1)
            event.wait()
            self._next = (self._next + 1) % PIECES


ORDERS = (128, 256, 512, 1024, 2048, 4096)
NBYTES = (16 << 20, 64 << 20, 256 << 20)
SHARE = 16  # each program takes at most 1/16 of a device's memory
ENOUGH_S = 5e-4
TAKE_S = 0.02
LEAST = 3  # runs of each program in a take

Run = Callable[[], float]
"""Runs a program, waits for it, and returns its seconds."""
Sizes = tuple[int, int]
"""Rows of the product's matrices, and bytes that the elementwise pass reads."""
ProbeTimes = tuple[list[float], list[float]]
"""Seconds of each run of the product, and of each run of the elementwise pass."""

_own = threading.local()
"""The programs of a worker. They are thread-local: all calls of a worker come on one thread, and
workers may share a process."""


def prepare(device: Device, emulation: Emulation, sizes: Sizes | None) -> Sizes | None:
    """Compile both programs, at the `sizes` of an earlier probe if there was one.

    Returns the programs' sizes; None if the device cannot run both programs.
    """
    room = device.info.memory_nbytes // SHARE
    orders = [n for n in ORDERS if 12 * n * n <= room] if sizes is None else [sizes[0]]
    nbytes = [n for n in NBYTES if 2 * n <= room] if sizes is None else [sizes[1]]
    product = _fitting(device, emulation, orders or [ORDERS[0]], _product)
    elementwise = _fitting(device, emulation, nbytes or [max(room // 2, 4)], _elementwise)
    if product is None or elementwise is None:
        return None
    _own.runs = product[1], elementwise[1]
    return product[0], elementwise[0]


def take(device: Device) -> ProbeTimes:
    """Run both programs in turn for `TAKE_S` seconds, and at least `LEAST` times each."""
    product, elementwise = _own.runs
    product()  # does not count: brings its data into the caches
    elementwise()
    measured: ProbeTimes = ([], [])
    begin_s = time.perf_counter()
    while len(measured[0]) < LEAST or time.perf_counter() - begin_s < TAKE_S:
        measured[0].append(product())
        measured[1].append(elementwise())
    return measured


def release(device: Device) -> None:
    """Free the programs and their memory."""
    del _own.runs


class Probes:
    """Probes members of a crew; a context manager, which frees the programs.

    Members whose devices cannot run the programs have no probe.
    """

    def __init__(
        self, crew: Crew, members: Sequence[str], like: Mapping[str, Probe] | None = None
    ) -> None:
        self._crew = crew
        emulations = crew.emulations
        earlier = {id: (probe.order, probe.nbytes) for id, probe in (like or {}).items()}
        arguments = {id: (emulations[id], earlier.get(id)) for id in members}
        sizes = crew.call_each("hetpipe.profile.probing:prepare", arguments)
        self._sizes: dict[str, Sizes] = {id: own for id, own in sizes.items() if own is not None}

    @property
    def orders(self) -> dict[str, int]:
        """Rows of the product's matrices, by member."""
        return {member: order for member, (order, _) in self._sizes.items()}

    def together(self, turns: int = 1) -> dict[str, Probe]:
        """Probe all members at once, and return the median of `turns` probes for each."""
        measured = [self._take(list(self._sizes)) for _ in range(turns)]
        return {member: median_probe([one[member] for one in measured]) for member in self._sizes}

    def alone(self, member: str) -> Probe | None:
        """Probe a member while the others are idle; None if its device cannot run the programs."""
        return self._take([member])[member] if member in self._sizes else None

    def _take(self, members: Sequence[str]) -> dict[str, Probe]:
        measured = self._crew.call(members, "hetpipe.profile.probing:take")
        pairs = zip(members, measured, strict=True)
        return {member: self._made(member, times) for member, times in pairs}

    def _made(self, member: str, measured: ProbeTimes) -> Probe:
        name = f"{member} ({self._crew.infos[member].id})"
        product, elementwise = (Samples.of(times_s) for times_s in measured)
        for subject, samples in (("product", product), ("elementwise pass", elementwise)):
            samples.check(f"{name}: the probe's {subject}")
            warn_of_bad(f"{name}: the probe's {subject}", samples)
        # Means, not medians: if something interrupts one run in ten, that slows training too.
        spread = max(product.spread, elementwise.spread)
        return Probe(product.mean_s, elementwise.mean_s, spread, *self._sizes[member])

    def __enter__(self) -> Probes:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:  # otherwise the workers may have ended
            self._crew.call(list(self._sizes), "hetpipe.profile.probing:release")


def median_probe(probes: Sequence[Probe]) -> Probe:
    """Return the medians of probes with the same programs, and the spread among these probes."""
    if len(probes) == 1:
        return probes[0]
    product, elementwise = (
        Samples.of(getattr(probe, name) for probe in probes)
        for name in ("arithmetic_s", "memory_s")
    )
    spread = max(product.spread, elementwise.spread)
    return Probe(product.median_s, elementwise.median_s, spread, probes[0].order, probes[0].nbytes)


def warn_of_bad(subject: str, samples: Samples) -> None:
    """Warn of times that are not credible and do not count."""
    if samples.bad:
        text = (
            f"{subject} took {samples.bad[0]} s, which is impossible: "
            f"{len(samples.bad)} of {len(samples.bad) + len(samples.good)} times are "
            "ignored; check the clock of this machine"
        )
        warnings.warn(text, ClockWarning, stacklevel=2)


PRODUCT, ELEMENTWISE = (torch.ops.aten.mm.default, 2), (torch.ops.aten.neg.default, 1)
"""Operator and number of operands of the two programs."""


def probe_graphs(order: int, nbytes: int) -> dict[str, bytes]:
    """Return the programs of a probe of these sizes, by name, as `dump_graph` writes them."""
    product = graph_of(*PRODUCT, (order, order))
    elementwise = graph_of(*ELEMENTWISE, (nbytes // 4,))
    return {
        "product of the probe": dump_graph(product),
        "elementwise pass of the probe": dump_graph(elementwise),
    }


def _product(device: Device, order: int) -> tuple[Executable, list[Buffer]] | None:
    shape = (order, order)
    program = compile_operator(device, *PRODUCT, shape)
    return None if program is None else (program, [filled_buffer(device, shape) for _ in range(2)])


def _elementwise(device: Device, nbytes: int) -> tuple[Executable, list[Buffer]] | None:
    shape = (nbytes // 4,)
    program = compile_operator(device, *ELEMENTWISE, shape)
    return None if program is None else (program, [filled_buffer(device, shape)])


def _fitting(
    device: Device,
    emulation: Emulation,
    sizes: Sequence[int],
    make: Callable[[Device, int], tuple[Executable, list[Buffer]] | None],
) -> tuple[int, Run] | None:
    """Return the first size at which a run takes `ENOUGH_S`, or else the last size, and the run."""
    for size in sizes:
        program = make(device, size)
        if program is None:
            return None
        run = _run(device, *program, emulation)
        run()  # the first run is slower
        if size == sizes[-1] or run() >= ENOUGH_S:
            break
    return size, run


def _run(device: Device, executable: Executable, inputs: list[Buffer], emulation: Emulation) -> Run:
    def run() -> float:
        begin = clock.begin()
        _, event, _ = check_ran(device, executable.run(inputs), 1)
        event.wait()
        time_s = clock.since_s(begin, emulation)
        clock.catch_up(begin, time_s, emulation)
        return time_s

    return run
