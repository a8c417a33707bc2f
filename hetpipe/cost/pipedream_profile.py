"""Published profiles in the format of PipeDream's `graph.txt`, which DAPPLE also uses.

A node is a line `name -- description -- forward_compute_time=ms, backward_compute_time=ms,
activation_size=bytes, parameter_size=bytes`; an edge is an indented line `name -- name`. The size
of several outputs is written `[bytes; bytes]`, and the sum counts. Times are for one mini-batch. In
a graph that PipeDream's optimizer has partitioned, ` -- stage_id=number` follows a node's costs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import accumulate
from pathlib import Path
from typing import Any

from hetpipe.errors import CostError
from hetpipe.records import read_text
from hetpipe.words import short, word

SEPARATOR = " -- "
FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
STAGE = "stage_id="
MOST = 1e18  # milliseconds or bytes: more than any profile has

Edge = tuple[str, str]


@dataclass(frozen=True)
class ProfileNode:
    """One operator, with its costs for one mini-batch. Raises `CostError` for impossible costs."""

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_nbytes: int
    params_nbytes: int
    stage: int | None = None  # in a profile that PipeDream's optimizer has partitioned

    def __post_init__(self) -> None:
        if not self.name or any(letter.isspace() for letter in self.name):
            raise CostError(f"a node is named {short(self.name)}; give it a name without spaces")
        if {"\n", "\r"} & set(self.description):
            raise CostError(f"the description of {self.name} has several lines; write it in one")
        for field in ("forward_s", "backward_s", "activation_nbytes", "params_nbytes"):
            value = getattr(self, field)
            if not 0 <= value < math.inf:  # NaN fails as well
                raise CostError(f"{field} of {self.name} is {value}; give 0 or more, finite")


@dataclass(frozen=True)
class ChainCosts:
    """The costs of a chain of layers for one mini-batch, with one entry for each layer.

    `cut_nbytes[i]` is the number of bytes that cross a cut after layer i: the activations of layers
    up to i that a later layer reads. An activation with several readers counts once. The last entry
    is 0. Raises `CostError` for unequal lengths.
    """

    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_nbytes: tuple[int, ...]
    params_nbytes: tuple[int, ...]
    cut_nbytes: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            if len(values) != len(self.names):
                raise CostError(
                    f"{name} has {len(values)} entries, the chain {len(self.names)} layers: "
                    "give one entry per layer"
                )


@dataclass(frozen=True)
class ProfileGraph:
    """The nodes of a profile in file order, and its edges from writer to reader."""

    nodes: tuple[ProfileNode, ...]
    edges: tuple[Edge, ...]

    def without_inputs(self) -> ProfileGraph:
        """Return the graph without Input nodes. Their forward only loads data."""
        nodes = tuple(node for node in self.nodes if not node.description.startswith("Input"))
        names = {node.name for node in nodes}
        return ProfileGraph(nodes, tuple(edge for edge in self.edges if names.issuperset(edge)))

    def order(self) -> tuple[ProfileNode, ...]:
        """Return the nodes with writers before readers, and otherwise in the order of the file.
        Raises `CostError` for a circle."""
        import networkx as nx  # type: ignore[import-untyped]

        if circle := self.circle():
            raise CostError(f"the edges go in a circle, {path_of(circle)}; remove one of them")
        places = {node.name: place for place, node in enumerate(self.nodes)}
        names = nx.lexicographical_topological_sort(self._graph(), places.__getitem__)
        return tuple(self.nodes[places[name]] for name in names)

    def circle(self) -> tuple[Edge, ...]:
        """Return the edges of a circle, in the order along it; empty if there is no circle."""
        import networkx as nx

        try:
            return tuple((writer, reader) for writer, reader in nx.find_cycle(self._graph()))
        except nx.NetworkXNoCycle:
            return ()

    def chain(self) -> ChainCosts:
        """Return the layers' costs in the order of `order`. Raises `CostError` for a circle."""
        layers = self.order()
        places = {layer.name: place for place, layer in enumerate(layers)}
        last_reader = dict.fromkeys(places, 0)
        for writer, reader in self.edges:
            last_reader[writer] = max(last_reader[writer], places[reader])
        changes = [0] * (len(layers) + 1)  # by how much the bytes change from cut to cut
        for place, layer in enumerate(layers):
            if last_reader[layer.name] > place:
                changes[place] += layer.activation_nbytes
                changes[last_reader[layer.name]] -= layer.activation_nbytes
        cut_nbytes = list(accumulate(changes))[: len(layers)]
        return ChainCosts(
            names=tuple(layer.name for layer in layers),
            forward_s=tuple(layer.forward_s for layer in layers),
            backward_s=tuple(layer.backward_s for layer in layers),
            activation_nbytes=tuple(layer.activation_nbytes for layer in layers),
            params_nbytes=tuple(layer.params_nbytes for layer in layers),
            cut_nbytes=tuple(cut_nbytes),
        )

    def _graph(self) -> Any:
        import networkx as nx

        graph = nx.DiGraph(self.edges)
        graph.add_nodes_from(node.name for node in self.nodes)
        return graph


def path_of(circle: Sequence[Edge]) -> str:
    """Return the names along a circle of edges, for a message; a long circle is abbreviated."""
    names = [word(name) for name in (circle[0][0], *(reader for _, reader in circle))]
    return " -> ".join(names if len(names) <= 10 else [*names[:8], "...", names[-1]])


def read_profile(path: Path) -> ProfileGraph:
    """Read a profile from a file. Raises `CostError`, with file and line for a wrong line."""
    text = read_text(path, CostError)
    node_lines: dict[str, int] = {}
    edge_lines: dict[Edge, int] = {}
    nodes: list[ProfileNode] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            if line[0].isspace():
                edge_lines.setdefault(_edge(line), number)
                continue
            node = _node(line)
            if node.name in node_lines:
                raise CostError(
                    f"{word(node.name)} occurs twice, first in line {node_lines[node.name]}; "
                    "give each node its own name"
                )
        except CostError as error:
            raise CostError(f"{path}:{number}: {error}") from error
        node_lines[node.name] = number
        nodes.append(node)
    if not nodes:
        raise CostError(f"{path}:1: the profile has no nodes; give one with a layer or more")
    for edge, number in edge_lines.items():
        if unknown := [name for name in edge if name not in node_lines]:
            why = f"the edge names {short(unknown[0])}, which is no node; name a node of the file"
            raise CostError(f"{path}:{number}: {why}")
    graph = ProfileGraph(tuple(nodes), tuple(edge_lines))
    if circle := graph.circle():
        number = max(edge_lines[edge] for edge in circle)
        raise CostError(f"{path}:{number}: the edge closes a circle, {path_of(circle)}; remove it")
    return graph


def _edge(line: str) -> Edge:
    names = tuple(line.strip().split(SEPARATOR))
    if len(names) != 2:
        raise CostError(f"an edge has {len(names)} names; write two as `node1{SEPARATOR}node2`")
    return names[0], names[1]


def _node(line: str) -> ProfileNode:
    name, _, rest = line.partition(SEPARATOR)
    before, separator, costs = rest.rpartition(SEPARATOR)
    stage = None
    if costs.startswith(STAGE):
        stage = _stage(costs.removeprefix(STAGE).strip())
        before, separator, costs = before.rpartition(SEPARATOR)
    if not separator:
        why = "a node lacks one of its parts; write"
        raise CostError(f"{why} `name{SEPARATOR}description{SEPARATOR}costs`")
    values: dict[str, str] = {}
    for item in costs.split(","):
        key, equals, value = item.partition("=")
        if not equals or key.strip() in values:
            why = "has no name before it" if not equals else "occurs twice"
            raise CostError(
                f"{short((key if equals else item).strip())} {why}; write name=number, with commas "
                "between, and a decimal point in numbers"
            )
        values[key.strip()] = value.strip()
    forward_ms, backward_ms, activation_nbytes, params_nbytes = (
        _number(values, field) for field in FIELDS
    )
    return ProfileNode(
        name,
        before,
        float(forward_ms.scaleb(-3)),
        float(backward_ms.scaleb(-3)),
        _whole("activation_size", activation_nbytes),
        _whole("parameter_size", params_nbytes),
        stage,
    )


def _stage(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise CostError(f"{STAGE.rstrip('=')} is {short(text)}; give the number of a stage")
    return int(text)


def _number(values: Mapping[str, str], field: str) -> Decimal:
    """Return the field's number, or the sum of `[a; b]`."""
    if field not in values:
        raise CostError(f"{field} is missing; give all of {', '.join(FIELDS)}")
    text = values[field]
    parts = text[1:-1].split(";") if text.startswith("[") and text.endswith("]") else [text]
    total = Decimal(0)
    for part in parts:
        try:
            number = Decimal(part.strip())
        except InvalidOperation as error:
            raise CostError(f"{field} is {short(text)}; give a number") from error
        if not number.is_finite() or not 0 <= number <= MOST:
            raise CostError(f"{field} is {word(text)}; give a number from 0 to {MOST:g}")
        total += number
    return total


def _whole(field: str, number: Decimal) -> int:
    if number != number.to_integral_value():
        raise CostError(f"{field} is {number}; give whole bytes")
    return int(number)
