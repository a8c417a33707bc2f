"""Passes in which the replicas of a stage meet: divided where the graph has sums over replicas.

Sums that do not wait for one another are one exchange. Between two exchanges runs an executable of
its own; what a later one reads is handed to it, except for views, and what depends on no sample,
which it computes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from hetpipe.capture.program import CUT, GRAD, INPUT, SAVED, TANGENT, Program, Slot, StageGraphs
from hetpipe.capture.slots import extract
from hetpipe.capture.views import base_of, in_graph_order
from hetpipe.errors import HetpipeError
from hetpipe.schedule.action import Action
from hetpipe.sdk.backend import DONE, Buffer, Chunk, Device, Event, Executable
from hetpipe.sdk.graph import canonical, dtype_name, graph_inputs, graph_outputs, of_one_replica
from hetpipe.sdk.replicas import is_sum
from hetpipe.wire.wire import EVALUATION, SUMS, Kind, Layout, host_dtype

Array = np.ndarray[Any, Any]

Meet = Callable[[list[Array]], list[Array]]
"""Own terms -> their sums over the replicas; every replica calls it at the same places."""


@dataclass(frozen=True, order=True)
class Within(Action):
    """One of the exchanges inside a pass, in their order."""

    place: int = 0


def exchanges(replicas: Sequence[StageGraphs]) -> dict[Kind, Layout]:
    """What the replicas of a stage exchange inside passes. Raises `HetpipeError` if they differ."""
    found: dict[str, list[Layout]] = {}
    for letter, program in (pair for stage in replicas for pair in _passes(stage)):
        layouts = [
            tuple(_slot(index, node) for index, node in enumerate(nodes))
            for nodes in _levels(program.graph.graph)[1]
        ]
        if found.setdefault(letter, layouts) != layouts:
            raise HetpipeError(
                f"the replicas of stage {replicas[0].stage} would sum {_text(found[letter])} and "
                f"{_text(layouts)} in the same pass: do not let the model's structure depend on "
                "the number of rows, or set sync_batch_norm=False"
            )
    return {
        (letter, place): layout
        for letter, layouts in found.items()
        for place, layout in enumerate(layouts)
    }


def compile_program(device: Device, program: Program, meet: Meet | None) -> Executable:
    """A program as one executable; without `meet` there is one replica, which has all rows."""
    if meet is None or not any(map(is_sum, program.graph.graph.nodes)):
        return device.compile(of_one_replica(program.graph))
    return _Divided(device, program, meet)


class _Part:
    """What runs between two exchanges. Tensors are known by the names of their nodes."""

    def __init__(
        self, device: Device, graph: fx.Graph, sources: list[fx.Node], made: list[fx.Node]
    ) -> None:
        self.executable = device.compile(canonical(extract(graph, sources, made))) if made else None
        self.sources = [node.name for node in sources]
        self.made = [node.name for node in made]
        self.last: frozenset[str] = frozenset()
        """Those of the sources that nobody reads later."""

    def run(
        self, env: dict[str, Buffer], lent: frozenset[str], after: Sequence[Event], queue: int
    ) -> Event | None:
        """Compute from `env` into it; of what is `lent`, the last reader may overwrite it."""
        if self.executable is None:
            return None
        given = lent & self.last
        donate = frozenset(i for i, name in enumerate(self.sources) if name in given)
        inputs = [env[name] for name in self.sources]
        outputs, event, _ = self.executable.run(inputs, donate, after, queue)
        env.update(zip(self.made, outputs, strict=True))
        for name in self.last:
            del env[name]
        return event


class _Divided(Executable):
    """Parts and the exchanges between them, one behind each but the last."""

    def __init__(self, device: Device, program: Program, meet: Meet) -> None:
        graph = program.graph
        self._device = device
        self._meet = meet
        self._inputs = [node.name for node in graph_inputs(graph)]
        self._outputs = [node.name for node in graph_outputs(graph)]
        level, self._sums = _levels(graph.graph)
        self._terms = [[node.all_input_nodes[0].name for node in nodes] for nodes in self._sums]
        self._parts = [
            _Part(device, graph.graph, sources, made)
            for sources, made in _division(program, level, self._sums)
        ]
        read = {*self._outputs, *(name for terms in self._terms for name in terms)}
        for part in reversed(self._parts):
            part.last = frozenset(part.sources) - read
            read.update(part.sources)

    def run(
        self,
        inputs: Sequence[Buffer],
        donate: frozenset[int] = frozenset(),
        after: Sequence[Event] = (),
        queue: int = 0,
    ) -> tuple[list[Buffer], Event, Sequence[Chunk]]:
        env = dict(zip(self._inputs, inputs, strict=True))
        lent = frozenset(self._inputs[index] for index in donate)
        for part, sums, terms in zip(self._parts, self._sums, self._terms, strict=False):
            event = part.run(env, lent, after, queue)
            after = (*after, event) if event is not None else after
            after = self._exchange(env, sums, terms, after)
        event = self._parts[-1].run(env, lent, after, queue)
        for each in () if event is not None else after:
            each.wait()
        return [env[name] for name in self._outputs], event or DONE, ()

    def _exchange(
        self, env: dict[str, Buffer], sums: list[fx.Node], names: list[str], after: Sequence[Event]
    ) -> list[Event]:
        terms, events = [], []
        for name in names:
            buffer = env[name]
            terms.append(np.empty(buffer.shape, host_dtype(buffer.dtype)))
            events.append(self._device.download(buffer, terms[-1], after))
        for event in events:
            event.wait()
        events = []
        for node, total in zip(sums, self._meet(terms), strict=True):
            env[node.name], event = self._device.upload(total)
            events.append(event)
        return events


def _division(
    program: Program, level: dict[fx.Node, int], sums: list[list[fx.Node]]
) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Of each part what it is given, and what others read of it or is returned."""
    varying = _varying(program)
    made: list[set[fx.Node]] = [set() for _ in range(len(sums) + 1)]
    read = [*graph_outputs(program.graph), *(n.all_input_nodes[0] for each in sums for n in each)]
    for node in read:
        if node.op == "call_function" and not is_sum(node):
            made[level[node]].add(node)
    sources: list[set[fx.Node]] = [set() for _ in made]
    for number in reversed(range(len(made))):
        stack, seen = [*made[number]], set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op == "placeholder" or is_sum(node):
                sources[number].add(node)
            elif level[node] < number and node in varying and base_of(node) is node:
                sources[number].add(node)
                made[level[node]].add(node)
            else:
                stack += node.all_input_nodes
    return [(in_graph_order(s), in_graph_order(m)) for s, m in zip(sources, made, strict=True)]


def _levels(graph: fx.Graph) -> tuple[dict[fx.Node, int], list[list[fx.Node]]]:
    """Of each node how many exchanges come before it; and the sums of each exchange."""
    level: dict[fx.Node, int] = {}
    sums: list[list[fx.Node]] = []
    for node in graph.nodes:
        level[node] = max((level[n] + is_sum(n) for n in node.all_input_nodes), default=0)
        if is_sum(node):
            sums += [[] for _ in range(level[node] + 1 - len(sums))]
            sums[level[node]].append(node)
    return level, sums


def _varying(program: Program) -> set[fx.Node]:
    """What differs from one micro-batch to the next."""
    roles = (INPUT, CUT, SAVED, TANGENT, GRAD)
    pairs = zip(graph_inputs(program.graph), program.inputs, strict=True)
    found = {node for node, slot in pairs if slot.role in roles}
    for node in program.graph.graph.nodes:
        if is_sum(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _passes(stage: StageGraphs) -> Iterator[tuple[str, Program]]:
    """The programs by the kind of the exchanges within."""
    for passes in stage.passes.values():
        yield SUMS["F"], passes.forward
        whole = () if passes.backward is None else (("B", passes.backward),)
        halves = whole if passes.halves is None else zip("IW", passes.halves, strict=True)
        yield from ((SUMS[letter], program) for letter, program in halves)
    yield from ((SUMS[EVALUATION], program) for program in stage.evaluation.values())


def _slot(index: int, node: fx.Node) -> Slot:
    value = node.meta["val"]
    return Slot("sum", str(index), tuple(value.shape), dtype_name(value.dtype))


def _text(layouts: Sequence[Layout]) -> str:
    return (
        " then ".join(
            ", ".join(f"{slot.dtype}{list(slot.shape)}" for slot in layout) for layout in layouts
        )
        or "nothing"
    )
