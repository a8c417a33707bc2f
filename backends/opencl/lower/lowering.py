"""Lowers a graph into launches, and describes its inputs and outputs for the executable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import fx

from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.graph import graph_calls, graph_inputs, graph_outputs, operator_name
from hetpipe.sdk.indices import Bound, index_bounds

from .arena import inherits, lives, nbytes
from .builder import Builder
from .expr import Const, Expr, Value, loads
from .launch import Launch
from .reduce import reduce
from .reductions import MINIMUM
from .registry import LOWERINGS, Lowering
from .target import Target

MOVED = frozenset(
    {
        "aten._to_copy", "aten.view", "aten._unsafe_view", "aten.reshape", "aten.permute",
        "aten.t", "aten.transpose", "aten.expand", "aten.unsqueeze", "aten.squeeze", "aten.slice",
        "aten.select", "hetpipe.keep_mask", "hetpipe.uniform",
    }
)  # fmt: skip
"""Operators that move to their first reader, as elementwise operators do."""


@dataclass(frozen=True)
class Output:
    """A result of a graph: the placeholder with index `source`, or the tensor `value`.

    The tensor may take the memory of a donated placeholder whose index is in `heirs`.
    """

    value: Value | None
    source: int | None = None
    heirs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lowered:
    inputs: tuple[Value, ...]
    outputs: tuple[Output, ...]
    results: tuple[int, ...]
    """For each result of the graph, its index in `outputs`."""
    launches: tuple[Launch, ...]
    checks: tuple[Check, ...] = ()
    """Index tensors to check at the end of a run."""
    together: frozenset[int] = frozenset()
    """Indices of the `outputs` that may share a piece of memory, see `hetpipe.sdk.graph`."""

    @cached_property
    def crossing(self) -> frozenset[int]:
        """Ids of a run's inputs, outputs and checked tensors; other tensors are intermediates."""
        values = [*self.inputs, *(check.value for check in self.checks)]
        values += [output.value for output in self.outputs if output.value is not None]
        return frozenset(value.id for value in values)


def lower(
    graph: fx.GraphModule, target: Target, lowerings: Mapping[str, Lowering] = LOWERINGS
) -> Lowered:
    """Lower every node that a result needs, in the order that `order` returns."""
    nodes = graph_outputs(graph)
    builder = Builder(target, frozenset(nodes))
    placeholders = graph_inputs(graph)
    inputs = list(map(builder.input, placeholders))
    calls = order(graph)
    for node in calls:
        lowering = lowerings.get(operator_name(node))
        if lowering is None:
            raise UnsupportedOperatorError(
                f"{target.info.id} has no kernel for {operator_name(node)}"
            )
        lowering.of_family(target.family)(builder, node)
    distinct = list(dict.fromkeys(nodes))
    taken = {value.id for value in inputs}
    outputs: list[Output] = []
    for node in distinct:
        if node.op == "placeholder":
            outputs.append(Output(None, placeholders.index(node)))
            continue
        # A caller may donate one result and keep another, so results never share memory.
        value = builder.value(node)
        if value.id in taken:
            value = builder.store_copy(builder.expr(node))
        taken.add(value.id)
        outputs.append(Output(value))
    checked = checks(builder, calls)
    results = [output.value for output in outputs if output.value is not None]
    launches = builder.finish([*results, *(check.value for check in checked)])
    return Lowered(
        tuple(inputs),
        _with_heirs(outputs, inputs, launches),
        tuple(map(distinct.index, nodes)),
        launches,
        checked,
        _together(graph, nodes, distinct, outputs),
    )


def order(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the operators that the results need, in the order of lowering.

    An elementwise operator that only results need directly follows its operands. A traced graph
    has it at the end, where its operands have left the cache, and the kernels that read them are
    too far away to include it. A traced graph begins with all recomputed masks and copies of
    inputs. Each of these moves directly before its first reader, and takes no memory until then.
    """
    needed = set(graph_outputs(graph))
    for node in reversed(graph.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    calls = [node for node in graph_calls(graph) if node in needed]
    outputs = set(graph_outputs(graph))
    users = {node: [user for user in node.users if user in needed] for node in calls}
    early: set[fx.Node] = set()
    for node in reversed(calls):
        is_early = all(user in early for user in users[node]) if users[node] else node in outputs
        if is_early and _is_pointwise(node):
            early.add(node)
    late = _late(graph)
    place: dict[fx.Node, float] = dict.fromkeys(graph_inputs(graph), -1)
    first: dict[fx.Node, float] = {}
    for at, node in reversed(list(enumerate(calls))):
        first[node] = at
        if node in late and users[node] and not early.intersection(users[node]):
            first[node] = min(first[user] - (user not in late) / 2 for user in users[node])
    for node in calls:
        inputs = [place[other] for other in node.all_input_nodes]
        place[node] = max(inputs, default=-1) if node in early else first[node]
    return sorted(calls, key=place.__getitem__)


def _late(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the inputs, and the elementwise operators, views and masks that need only inputs."""
    late = set(graph_inputs(graph))
    for node in graph_calls(graph):
        name = operator_name(node).rpartition(".")[0]
        if (_is_pointwise(node) or name in MOVED) and late.issuperset(node.all_input_nodes):
            late.add(node)
    return late


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _together(
    graph: fx.GraphModule,
    nodes: Sequence[fx.Node],
    distinct: Sequence[fx.Node],
    outputs: Sequence[Output],
) -> frozenset[int]:
    """Return the indices of outputs whose results the caller always keeps together."""
    marked = graph.graph.output_node().meta.get("together", frozenset())
    apart = {node for result, node in enumerate(nodes) if result not in marked}
    pairs = enumerate(zip(distinct, outputs, strict=True))
    return frozenset(at for at, (node, out) in pairs if node not in apart and out.value is not None)


def _with_heirs(
    outputs: Sequence[Output], inputs: Sequence[Value], launches: Sequence[Launch]
) -> tuple[Output, ...]:
    life = lives(launches)
    returned = {output.source for output in outputs}
    alike: dict[int, list[int]] = {}  # inputs by size
    for index, value in enumerate(inputs):
        if index not in returned:
            alike.setdefault(nbytes(value), []).append(index)
    with_heirs = []
    for output in outputs:
        heirs: list[int] = []
        if output.value is not None and output.value.id in life:
            mine = life[output.value.id]
            for index in alike.get(mine.nbytes, ()):
                key = inputs[index].id
                if key not in life or inherits(key, output.value.id, life, launches):
                    heirs.append(index)
            # Operands of the output's first launch come first, because they are in the cache.
            first = launches[mine.first].inplace
            heirs.sort(key=lambda index: inputs[index].id not in first)
        with_heirs.append(Output(output.value, output.source, tuple(heirs)))
    return tuple(with_heirs)


NONE = int(np.iinfo(np.int64).max)
"""Result of a check that finds no index out of range."""


@dataclass(frozen=True)
class Check:
    """A check: `value` (int64, one element) is the least index outside `bound`, or NONE."""

    bound: Bound
    value: Value


def checks(builder: Builder, calls: Iterable[fx.Node]) -> tuple[Check, ...]:
    """Lower the checks of all calls with indices; calls with equal index and bound share a check.

    The end event of a pass reports an index out of range. Kernels never access memory outside a
    tensor: a read at such an index gives NaN (0 for integers), and a write there does nothing.
    """
    distinct: dict[tuple[Any, ...], Check] = {}
    for bound in chain.from_iterable(map(index_bounds, calls)):
        index = builder.expr(bound.index)
        key = (index, bound.low, bound.size, bound.ignored)
        # Indices that read no tensor are constants of the graph: torch has already checked them.
        if key not in distinct and index.numel and loads(index):
            distinct[key] = Check(bound, _least_outside(builder, index, bound))
    # An index tensor of one element and a view of it have one result, which needs one check.
    return tuple({check.value.id: check for check in reversed(distinct.values())}.values())[::-1]


def _least_outside(builder: Builder, index: Expr, bound: Bound) -> Value:
    if index.dtype != "int64":
        index = builder.apply("convert_{T}({0})", "int64", index, weight=0)
    ignored = bound.low if bound.ignored is None else bound.ignored
    numbers = (
        builder.pool.make(Const, index.shape, "int64", number)
        for number in (NONE, bound.low, bound.size, ignored)
    )
    inside = "(({0} >= {2}) & ({0} < {3})) | ({0} == {4})"
    code = f"select({{0}}, {{1}}, convert_{{M}}({inside}))"
    outside = builder.apply(code, "int64", index, *numbers, weight=4)
    return reduce(builder, outside, range(len(index.shape)), MINIMUM)
