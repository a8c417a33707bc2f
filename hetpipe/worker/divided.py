"""Compiles and exports the programs of stages. A program that exchanges values with other replicas
is divided at each exchange (`hetpipe.capture.passes.division`) into several executables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from hetpipe.capture.passes.division import Division, Exchange, Segment, divide, has_sums, layouts
from hetpipe.capture.program import GRAD, SAVED, Program, StageGraphs
from hetpipe.errors import BackendError, HetpipeError, UnsupportedOperatorError
from hetpipe.schedule.action import Action
from hetpipe.sdk.backend import DONE, Buffer, Chunk, Device, Event, Executable
from hetpipe.sdk.formats.bundle import Exported
from hetpipe.sdk.graph import load_graph, of_one_replica
from hetpipe.sdk.host.validation import check_ran, upload
from hetpipe.sdk.support import require_support
from hetpipe.wire.wire import Array, Content, Kind, Layout, host_dtype
from hetpipe.worker.blame import compile_graphs, run_error

Meet = Callable[[list[Array]], list[Array]]
"""Sums the given terms over the replicas. All replicas call it at the same places in a pass."""


@dataclass(frozen=True, order=True)
class Within(Action):
    """An exchange inside a pass; `place` is its number in the pass."""

    place: int = 0


def exchanges(replicas: Sequence[StageGraphs]) -> dict[Kind, Layout]:
    """Return the messages that replicas exchange in passes. Raises `HetpipeError` if the replicas'
    exchanges differ."""
    by_pass: dict[Content, list[Layout]] = {}
    for content, program in (pair for stage in replicas for pair in _passes(stage)):
        sums = layouts(program)
        if by_pass.setdefault(content, sums) != sums:
            raise HetpipeError(
                f"the replicas of stage {replicas[0].stage} would sum {_text(by_pass[content])} "
                f"and {_text(sums)} in the same pass: do not let the model's structure depend on "
                "the number of rows, or set sync_batch_norm=False"
            )
    return {
        Kind(content, place): layout
        for content, sums in by_pass.items()
        for place, layout in enumerate(sums)
    }


def compile_programs(
    device: Device, programs: Sequence[Program], meet: Meet | None
) -> list[Executable]:
    """Compile each program to one executable. Without `meet`, there is only one replica."""
    divided = [meet is not None and has_sums(program) for program in programs]
    whole = [p for p, parts in zip(programs, divided, strict=True) if not parts]
    executables = iter(compile_graphs(device, list(map(mark_results, whole))))
    return [
        _DividedProgram(device, divide(program), meet) if parts and meet else next(executables)
        for program, parts in zip(programs, divided, strict=True)
    ]


def mark_results(program: Program) -> fx.GraphModule:
    """Return the graph for one replica, with a mark on the results that are read together later."""
    graph = of_one_replica(program.graph)
    together = {index for index, slot in enumerate(program.outputs) if slot.role in (SAVED, GRAD)}
    graph.graph.output_node().meta["together"] = frozenset(together)
    return graph


class _CompiledSegment:
    def __init__(self, device: Device, part: Segment) -> None:
        self.part = part
        self._device = device
        self.executable: Executable | None = None
        if part.graph is not None:
            (self.executable,) = compile_graphs(device, [part.graph])

    def run(
        self, env: dict[str, Buffer], lent: frozenset[str], after: Sequence[Event], queue: int
    ) -> Event | None:
        """Take inputs from `env` and put results there; the last reader of a `lent` value may
        overwrite the value."""
        if self.executable is None:
            return None
        part = self.part
        free = lent & part.last
        donate = frozenset(index for index, name in enumerate(part.sources) if name in free)
        inputs = [env[name] for name in part.sources]
        try:
            ran = self.executable.run(inputs, donate, after, queue)
            outputs, event, _ = check_ran(self._device, ran, len(part.results))
        except Exception as error:
            assert part.graph is not None
            raise run_error(self._device, part.graph, inputs, donate, error) from error
        env.update(zip(part.results, outputs, strict=True))
        for name in part.last:
            del env[name]
        return event


class _DividedProgram(Executable):
    def __init__(self, device: Device, division: Division, meet: Meet) -> None:
        self._device = device
        self._division = division
        self._meet = meet
        self._parts = [_CompiledSegment(device, part) for part in division.parts]

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        names = self._division.inputs
        env = dict(zip(names, inputs, strict=True))
        lent = frozenset(names[index] for index in donate)
        for part, exchange in zip(self._parts, self._division.exchanges, strict=False):
            event = part.run(env, lent, after, queue)
            after = (*after, event) if event is not None else after
            after = self._exchange(env, exchange, after)
        event = self._parts[-1].run(env, lent, after, queue)
        for earlier in () if event is not None else after:
            earlier.wait()
        return [env[name] for name in self._division.outputs], event or DONE, ()

    def _exchange(
        self, env: dict[str, Buffer], exchange: Exchange, after: Sequence[Event]
    ) -> list[Event]:
        terms, events = [], []
        for event in after:
            event.wait()
        for name in exchange.terms:
            buffer = env[name]
            terms.append(np.empty(buffer.shape, host_dtype(buffer.dtype)))
            events.append(self._device.download(buffer, terms[-1]))
        for event in events:
            event.wait()
        events = []
        for name, total in zip(exchange.sums, self._meet(terms), strict=True):
            env[name], event = upload(self._device, total)
            events.append(event)
        return events


def _passes(stage: StageGraphs) -> Iterator[tuple[Content, Program]]:
    """Yield each program with the content of its exchanges."""
    for passes in stage.passes.values():
        yield Content.SUM_IN_FORWARD, passes.forward
        letters = "IW" if passes.halves else "B"
        for letter, program in zip(letters, passes.backwards, strict=False):
            yield Content.sum_in(letter), program
    yield from ((Content.SUM_IN_EVALUATION, program) for program in stage.evaluation.values())
    yield from ((Content.SUM_IN_INFERENCE, program) for program in stage.inference.values())


def _text(layouts: Sequence[Layout]) -> str:
    return (
        " then ".join(
            ", ".join(f"{slot.dtype}{list(slot.shape)}" for slot in layout) for layout in layouts
        )
        or "nothing"
    )


def compile_ahead(device: Device, stages: Sequence[StageGraphs]) -> None:
    """Let the device begin to compile supported programs; unsupported ones are refused at load."""
    graphs = []
    for stage in stages:
        for program in stage.programs.values():
            if has_sums(program):  # its division depends on the replicas
                continue
            graph = mark_results(program)
            try:
                require_support(device, graph)
            except UnsupportedOperatorError:
                continue
            graphs.append(graph)
    device.compile_ahead(graphs)


def find_refusals(device: Device, stages: Sequence[StageGraphs]) -> dict[int, str]:
    """Return, by index in `stages`, the reasons why the device cannot run a stage's programs."""
    reasons: dict[int, str] = {}
    for number, stage in enumerate(stages):
        try:
            for program in stage.programs.values():
                require_support(device, of_one_replica(program.graph))
        except UnsupportedOperatorError as error:
            reasons[number] = str(error)
    return reasons


def export(
    device: Device, stage: StageGraphs, more: Mapping[str, bytes]
) -> tuple[Exported, dict[str, str]]:
    """Return the kernels of all programs that a training compiles, and `Device.binary_facts`.

    `more` has further graphs, from `dump_graph`. Raises `BackendError` if nothing is exported.
    """
    if not device.info.capabilities.exports:
        raise BackendError(f"backend {device.info.backend!r} does not export kernels")
    halved = [passes.backward for passes in stage.passes.values() if passes.halves is not None]
    graphs = {
        name: of_one_replica(program.graph)
        for name, program in stage.programs.items()
        if program not in halved
    }
    graphs |= {name: load_graph(data) for name, data in more.items()}
    return device.export(graphs), dict(device.binary_facts())
