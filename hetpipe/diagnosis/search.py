"""Trials of graphs on a member's device, and the search for operators whose results are wrong.

A result is wrong if it differs from the reference: torch in float64 on this processor.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from hetpipe.check.difference import Difference, eps_of, tensor_difference
from hetpipe.check.reference import (
    Value,
    Values,
    call_of,
    disturb_node,
    exact_value,
    is_comparable,
    reference_values,
    rounding_effects,
    tensors_of,
    terms_of,
)
from hetpipe.check.search import first_fault, others_fail, shortest_fault
from hetpipe.crew.workers import Workers
from hetpipe.sdk.graph import dump_graph, graph_inputs, operator_name
from hetpipe.sdk.host.parts import Part, Unit, part_of, reachable, units_of
from hetpipe.sdk.operators.recurrent import is_workspace
from hetpipe.wire.wire import Array
from hetpipe.worker.graph_trials import DeviceFailedError, Held

Given = torch.Tensor | Held
"""An input: a tensor, or a value on the device."""

_MODULE = "hetpipe.worker.graph_trials"


class Trials:
    """Trials on one member; the names of all graphs and values begin with `prefix`."""

    def __init__(self, crew: Workers, member: str, prefix: str) -> None:
        self._crew, self._member, self._prefix = crew, member, prefix
        self._count = 0

    def compile(self, graph: fx.GraphModule) -> str:
        """Compile a graph and return its name. Raises `DeviceFailedError` if the device raises."""
        self._count += 1
        name = f"{self._prefix}graph {self._count}"
        self._call("compile_graph", name, dump_graph(graph))
        return name

    def run(
        self,
        name: str,
        inputs: Sequence[Given],
        donate: frozenset[int] = frozenset(),
        kept: Mapping[int, str] | None = None,
        unread: frozenset[int] = frozenset(),
    ) -> list[torch.Tensor | None]:
        """Run a graph and return its outputs; None for the indices in `unread`.

        `kept` maps indices of outputs to names under which these outputs also stay on the device,
        see `held`. Raises `DeviceFailedError` if the device raises.
        """
        given = [value if isinstance(value, Held) else array_of(value) for value in inputs]
        names = {index: self._prefix + own for index, own in (kept or {}).items()}
        outputs = self._call("run_graph", name, given, donate, names, unread)
        return [  # a read-only array is copied, because torch's tensors are writable
            None if a is None else torch.from_numpy(a if a.flags.writeable else a.copy())
            for a in outputs
        ]

    def held(self, name: str) -> Held:
        """Return a reference to an output that was kept on the device."""
        return Held(self._prefix + name)

    def forget(self, name: str | None = None) -> None:
        """Free one graph, or all graphs and values of these trials."""
        self._crew.call([self._member], f"{_MODULE}:forget", name or self._prefix)

    def _call(self, function: str, *args: Any) -> Any:
        (result,) = self._crew.call([self._member], f"{_MODULE}:{function}", *args)
        if isinstance(result, DeviceFailedError):
            raise result
        return result


def array_of(tensor: torch.Tensor) -> Array:
    """Return a tensor as a host array; bfloat16 becomes int16."""
    tensor = tensor.contiguous()
    array: Array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def declared(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a device's tensor in the declared dtype; bfloat16 arrives as int16."""
    if tensor is not None and dtype is torch.bfloat16 and tensor.dtype is torch.int16:
        return tensor.view(torch.bfloat16)
    return tensor


NOISY_RUNS = 3
"""Runs of the reference with random rounding errors, to measure their effects."""
REPEATS = 6
"""Runs of an operator on the same inputs, to see whether its results change."""


@dataclass(frozen=True)
class Finding:
    """Nodes whose graph gives a wrong result, with the wrong tensor or the device's error."""

    nodes: tuple[fx.Node, ...]
    output: fx.Node
    difference: Difference
    actual: torch.Tensor | None = None
    failure: str = ""


class Search:
    """Search for faulty operators in one run of a program, with the reference value of every node.

    `held` maps placeholders to values that only the device can read.
    """

    def __init__(
        self,
        trials: Trials,
        graph: fx.GraphModule,
        values: Values,
        held: Mapping[fx.Node, Held],
    ) -> None:
        self._trials, self.graph, self.values, self._held = trials, graph, values, held
        self._units = units_of(graph)

    def alone(self, outputs: Iterable[fx.Node] | None = None) -> Finding | None:
        """Return the first operator that is wrong alone, on the reference values of its inputs.

        With `outputs`, search only the operators on which these outputs depend.
        """
        units: Iterable[Unit] = self._units
        if outputs is not None:
            needed = reachable(outputs, ())
            units = (unit for unit in units if not needed.isdisjoint(unit))
        return first_fault(units, lambda unit: self._probe([unit]))

    def is_steady(self, finding: Finding) -> bool:
        """Return whether an operator that is wrong alone gives the same wrong result each time."""
        part = self._part([next(unit for unit in self._units if unit[0] in finding.nodes)])
        if part is None or finding.failure or finding.actual is None:
            return True
        index = part.results.index(finding.output)
        name = self._trials.compile(part.graph)
        for _ in range(REPEATS):
            outputs = self._trials.run(name, [self._given(source) for source in part.sources])
            again = declared(outputs[index], finding.actual.dtype)
            terms = terms_of(part.nodes[0])
            if again is None or tensor_difference(again, finding.actual, terms).is_wrong:
                return False
        return True

    def unsteady(self) -> Finding | None:
        """Return the first operator that is wrong only in some runs, or after other inputs."""
        return first_fault(self._units, self._probe_again)

    def together(self) -> Finding | None:
        """Return the shortest sequence of consecutive operators that is wrong in one graph."""
        return shortest_fault(self._units, self._probe)

    def fails_elsewhere(self, finding: Finding) -> bool:
        """Return whether the device also raises in other operators, as a lost device does."""

        def fails(unit: Unit) -> bool:
            found = self._probe([unit])
            return found is not None and bool(found.failure)

        return others_fail(self._units, {operator_name(node) for node in finding.nodes}, fails)

    def allowed(self, node: fx.Node) -> float:
        """Return how large a node's error may be by rounding in this and in earlier nodes."""
        return 2 * self._spreads.get(node, 0.0)

    @cached_property
    def _spreads(self) -> dict[fx.Node, float]:
        """For each node, the largest effect of rounding errors in all nodes on its value."""
        inputs = [self.values[node] for node in graph_inputs(self.graph)]
        worst: dict[fx.Node, float] = {}
        for seed in range(NOISY_RUNS):
            disturb = partial(disturb_node, torch.Generator().manual_seed(seed))
            noisy = reference_values(self.graph, inputs, disturb)
            for node, value in noisy.items():
                if isinstance(value, torch.Tensor) and is_comparable(node):
                    effect = tensor_difference(value, self.values[node], 1).error
                    worst[node] = max(worst.get(node, 0.0), effect)
        return worst

    def _probe(self, units: Sequence[Unit]) -> Finding | None:
        """Run units in one graph; return None if they are right, or cannot run as one graph."""
        if (part := self._part(units)) is None:
            return None
        return self._run(part, [self.values], len(units) == 1)

    def _probe_again(self, unit: Unit) -> Finding | None:
        """Run a unit several times, in turns on its inputs and on its halved inputs."""
        if (part := self._part([unit])) is None:
            return None
        if any(source in self._held for source in part.sources):
            return None
        halved = {source: half_of(self.values[source]) for source in part.sources}
        call = part.nodes[0]
        halved[call] = exact_value(call, fx.map_arg((call.args, call.kwargs), halved.__getitem__))
        halved.update({item: halved[call][item.args[1]] for item in part.nodes[1:]})
        return self._run(part, [self.values, halved] * REPEATS, True)

    def _run(self, part: Part, runs: Sequence[Values], single: bool) -> Finding | None:
        """Return the first fault of a part on these values; None if the device refuses the part."""
        try:
            name = self._trials.compile(part.graph)
            wrong = next(self._wrong(part, name, runs, single), None)
            self._trials.forget(name)
        except DeviceFailedError as error:
            if error.refused:
                return None
            gone = Difference(math.inf, 0.0)
            return Finding(part.nodes, part.results[-1], gone, failure=str(error))
        return wrong

    def _wrong(
        self, part: Part, name: str, runs: Sequence[Values], single: bool
    ) -> Iterator[Finding]:
        for values in runs:
            outputs = self._trials.run(name, [self._given(s, values) for s in part.sources])
            for node, output in zip(part.results, outputs, strict=True):
                found, actual = self._compare(node, output, values, single)
                if found.is_wrong:
                    yield Finding(part.nodes, node, found, actual)

    def _part(self, units: Sequence[Unit]) -> Part | None:
        """Return units as a graph; None if the graph has no result, or an input is unknown."""
        part = part_of(self.graph, units, is_comparable)
        if part is None or any(is_workspace(s) and s not in self._held for s in part.sources):
            return None
        return replace(part, graph=_castable(part.graph, self._held))

    def _given(self, source: fx.Node, values: Values | None = None) -> Given:
        if source in self._held:
            return self._held[source]
        value: torch.Tensor = (values or self.values)[source]
        return value.float() if value.dtype is torch.bfloat16 else value

    def _compare(
        self, node: fx.Node, output: torch.Tensor | None, values: Values, single: bool
    ) -> tuple[Difference, torch.Tensor]:
        """Compare a node's value; `single` says whether its operator ran alone."""
        actual, expected = declared(output, node.meta["val"].dtype), values[node]
        assert actual is not None
        call = call_of(node)
        read = [t for source in call.all_input_nodes for t in tensors_of(values[source])]
        eps = eps_of(*(tensor.dtype for tensor in read))
        found = tensor_difference(actual, expected, terms_of(call), eps)
        if not found.is_wrong:
            return found, actual
        extra = _beyond(call, node, values) if single else self.allowed(node)
        return Difference(found.error, found.allowed + extra), actual


def _beyond(call: fx.Node, node: fx.Node, values: Values) -> float:
    """Return the error that a single operator may have beyond the tolerance."""
    arguments: Any = fx.map_arg((call.args, call.kwargs), values.__getitem__)
    effects = rounding_effects(call, arguments, values[call])
    if call is node:
        return effects[0]
    ids = [id(tensor) for tensor in tensors_of(values[call])]
    return effects[ids.index(id(values[node]))]


def half_of(value: Value) -> Value:
    """Return a floating tensor times 0.5, and other values unchanged."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value * 0.5 if is_float else value


def _castable(graph: fx.GraphModule, held: Mapping[fx.Node, Held]) -> fx.GraphModule:
    """Replace bfloat16 inputs, which a host cannot upload, by casts of float32 inputs."""
    names = {node.name for node in held}
    inputs = graph_inputs(graph)
    narrow = [node for node in inputs if node.meta["val"].dtype is torch.bfloat16]
    for node in (node for node in narrow if node.name not in names):
        with graph.graph.inserting_after(inputs[-1]):
            cast = graph.graph.call_function(
                torch.ops.aten._to_copy.default, (node,), {"dtype": torch.bfloat16}
            )
        cast.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(cast, partial(operator.is_not, cast))
        node.meta["val"] = node.meta["val"].float()
    return graph
