"""Search: the operator of a program at which a device and the judge part."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from hetpipe.diagnosis.judge import (
    Difference,
    Value,
    Values,
    difference,
    eps_of,
    exactly,
    is_comparable,
    judged,
    node_spread,
    spread,
    tensors_of,
    terms_of,
)
from hetpipe.diagnosis.trials import DeviceFailedError, Given, Trials, declared
from hetpipe.sdk.graph import graph_inputs, operator_name
from hetpipe.sdk.parts import Part, part_of, reachable, units_of
from hetpipe.sdk.recurrent import is_workspace
from hetpipe.worker.graph_trials import Held

NOISY_RUNS = 3
REPEATS = 6
ELSEWHERE = 4  # operators that are tried after a failure


@dataclass(frozen=True)
class Finding:
    """Nodes that are wrong in one graph: the tensor that parts, or the device's own error."""

    nodes: tuple[fx.Node, ...]
    output: fx.Node
    difference: Difference
    actual: torch.Tensor | None = None
    failure: str = ""


class Search:
    """One run of a program: its graph, its inputs, and the judge's value of every node.

    `held` are placeholders whose values only the device can read.
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
        """The first operator that is wrong by itself, given the judge's inputs; of those that these
        outputs depend on, if any are given."""
        needed = None if outputs is None else reachable(outputs, ())
        for number, unit in enumerate(self._units):
            if needed is not None and needed.isdisjoint(unit):
                continue
            if (finding := self._window(number, number + 1)) is not None:
                return finding
        return None

    def is_steady(self, finding: Finding) -> bool:
        """Whether an operator that is wrong by itself is so in the same way each time."""
        number = next(n for n, unit in enumerate(self._units) if unit[0] in finding.nodes)
        part = self._part(number, number + 1)
        if part is None or finding.failure or finding.actual is None:
            return True
        index = part.results.index(finding.output)
        name = self._trials.compile(part.graph)
        for _ in range(REPEATS):
            outputs = self._trials.run(name, [self._given(source) for source in part.sources])
            again = declared(outputs[index], finding.actual.dtype)
            terms = terms_of(part.nodes[0])
            if again is None or difference(again, finding.actual, terms).parts:
                return False
        return True

    def unsteady(self) -> Finding | None:
        """The first operator that is wrong once it has had other inputs, or now and then."""
        for number in range(len(self._units)):
            if (finding := self._repeated(number)) is not None:
                return finding
        return None

    def together(self) -> Finding | None:
        """The shortest run of operators, in the graph's order, that is wrong in one graph."""
        right, wrong = 0, len(self._units)
        finding = self._window(0, wrong)
        if finding is None:
            return None
        while wrong - right > 1:
            middle = (right + wrong) // 2
            shorter = self._window(0, middle)
            if shorter is None:
                right = middle
            else:
                wrong, finding = middle, shorter
        low, high = 0, wrong  # from `low` it is wrong, from `high` right
        while high - low > 1:
            middle = (low + high) // 2
            shorter = self._window(middle, wrong)
            if shorter is None:
                high = middle
            else:
                low, finding = middle, shorter
        return finding

    def fails_elsewhere(self, finding: Finding) -> bool:
        """Whether the device raises in all other operators, too: it may be lost."""
        failed = {operator_name(node) for node in finding.nodes}
        others = {operator_name(unit[0]): n for n, unit in enumerate(self._units)}
        numbers = [n for name, n in others.items() if name not in failed]
        found = [self._window(n, n + 1) for n in numbers[:ELSEWHERE]]
        return bool(found) and all(each is not None and each.failure for each in found)

    def allowed(self, node: fx.Node) -> float:
        """The error of a node that rounding explains, of all nodes before it as well."""
        return 2 * self._spreads.get(node, 0.0)

    @cached_property
    def _spreads(self) -> dict[fx.Node, float]:
        """By node, the effect on it of errors that every node may have."""
        inputs = [self.values[node] for node in graph_inputs(self.graph)]
        worst: dict[fx.Node, float] = {}
        for seed in range(NOISY_RUNS):
            noisy = judged(self.graph, inputs, torch.Generator().manual_seed(seed))
            for node, value in noisy.items():
                if isinstance(value, torch.Tensor) and is_comparable(node):
                    own = spread([value], self.values[node])
                    worst[node] = max(worst.get(node, 0.0), own)
        return worst

    def _window(self, low: int, high: int) -> Finding | None:
        """Run the units low..high in one graph; None if they are right, or cannot be run so."""
        if (part := self._part(low, high)) is None:
            return None
        try:
            name = self._trials.compile(part.graph)
            outputs = self._trials.run(name, [self._given(source) for source in part.sources])
            self._trials.forget(name)
        except DeviceFailedError as error:
            return None if error.refused else _failing(part, str(error))
        for node, output in zip(part.results, outputs, strict=True):
            found, actual = self._compare(node, output, self.values, single=high - low == 1)
            if found.parts:
                return Finding(part.nodes, node, found, actual)
        return None

    def _repeated(self, number: int) -> Finding | None:
        """Run one unit again and again, on its inputs and on the half of them in turn."""
        if (part := self._part(number, number + 1)) is None:
            return None
        if any(source in self._held for source in part.sources):
            return None
        halved = {source: _half(self.values[source]) for source in part.sources}
        call = part.nodes[0]
        halved[call] = exactly(call, fx.map_arg((call.args, call.kwargs), halved.__getitem__))
        halved.update({item: halved[call][item.args[1]] for item in part.nodes[1:]})
        try:
            name = self._trials.compile(part.graph)
            for values in (self.values, halved) * REPEATS:
                inputs = [self._given(source, values) for source in part.sources]
                outputs = self._trials.run(name, inputs)
                for node, output in zip(part.results, outputs, strict=True):
                    found, actual = self._compare(node, output, values, single=True)
                    if found.parts:
                        return Finding(part.nodes, node, found, actual)
            self._trials.forget(name)
        except DeviceFailedError as error:
            return None if error.refused else _failing(part, str(error))
        return None

    def _part(self, low: int, high: int) -> Part | None:
        """The units low..high as a graph; None if it has no result, or unknown inputs."""
        part = part_of(self.graph, self._units[low:high], is_comparable)
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
        """Compare a node's value: by itself, or after others in one graph."""
        actual, expected = declared(output, node.meta["val"].dtype), values[node]
        assert actual is not None
        call = node.all_input_nodes[0] if operator_name(node) == "getitem" else node
        read = [t for source in call.all_input_nodes for t in tensors_of(values[source])]
        found = difference(actual, expected, terms_of(call), eps_of([*read, expected]))
        if not found.parts:
            return found, actual
        extra = _beyond(call, node, values) if single else self.allowed(node)
        return Difference(found.error, found.allowed + extra), actual


def _failing(part: Part, text: str) -> Finding:
    """The finding that the device raises."""
    gone = Difference(math.inf, 0.0)
    return Finding(part.nodes, part.results[-1], gone, failure=text)


def _beyond(call: fx.Node, node: fx.Node, values: Values) -> float:
    """The error that a single operator may have beyond the usual bound."""
    arguments: Any = fx.map_arg((call.args, call.kwargs), values.__getitem__)
    spreads = node_spread(call, arguments, values[call])
    if call is node:
        return spreads[0]
    own = [id(tensor) for tensor in tensors_of(values[call])]
    return spreads[own.index(id(values[node]))]


def _half(value: Value) -> Value:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value * 0.5 if is_float else value


def _castable(graph: fx.GraphModule, held: Mapping[fx.Node, Held]) -> fx.GraphModule:
    """The graph with bfloat16 inputs, which a host cannot upload, cast from float32."""
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
