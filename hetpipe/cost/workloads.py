"""Workloads: the JSON profiles of two papers.

- Device placement (Tarnawski et al., NeurIPS 2020): forward and backward nodes, and edges.
- Piper (Tarnawski et al., NeurIPS 2021): nodes with times by tensor-parallel degree, and edges.

The READMEs of msr-fiddle/dnn-partitioning and msr-fiddle/piper describe the fields, but not the
unit of time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from hetpipe.cost.pipedream_profile import ChainCosts, ProfileGraph, ProfileNode, path_of
from hetpipe.records import Count, Entries, Number, Source, Whole
from hetpipe.words import words

Latency = Literal["accelerator", "cpu"]
"""The device whose times count. (The files call any accelerator an FPGA.)"""

FORWARD_SHARE = 1 / 3
"""The forward's share of a time for both passes: a backward has twice as many matrix products."""
CURES = {
    "edges.size": "write the bytes that cross the edge",
    "edges.communicationCost": "write the bytes that cross the edge",
}
"""The cure for a wrong or missing value, by its place."""

Amount = Annotated[float, Number(most=1e18)]  # units of time or bytes


class OpenRecord:
    """A record that ignores unknown keys: the files have further keys for the papers' planners."""

    __pydantic_config__: ClassVar[Mapping[str, str]] = {"extra": "ignore"}


@dataclass(frozen=True)
class _Edge(OpenRecord):
    sourceId: Count
    destId: Count


@dataclass(frozen=True)
class _SizedEdge(_Edge):
    size: Amount

    @property
    def nbytes(self) -> int:
        return math.ceil(self.size)


@dataclass(frozen=True)
class _Node(OpenRecord):
    id: Count
    supportedOnFpga: bool
    cpuLatency: Amount
    fpgaLatency: Amount
    isBackwardNode: bool
    size: Amount
    colorClass: Annotated[int, Whole(-(2**63))] | None = None
    name: str = ""


@dataclass(frozen=True)
class _Workload(OpenRecord):
    """Nodes and edges in the order of the file."""

    nodes: Annotated[tuple[_Node, ...], Entries(1)]
    edges: tuple[_SizedEdge, ...]


@dataclass(frozen=True)
class _PiperEdge(_Edge):
    communicationCost: Amount

    @property
    def nbytes(self) -> int:
        return math.ceil(self.communicationCost)


@dataclass(frozen=True)
class _PiperCosts(OpenRecord):
    timePerSample: Amount  # forward and backward together
    parameterSize: Amount
    memoryUsageA: Amount  # kept per micro-batch in flight


@dataclass(frozen=True)
class _PiperNode(OpenRecord):
    id: Count
    TMPCs: dict[str, Annotated[tuple[_PiperCosts, ...], Entries(1)]]  # by tensor-parallel degree
    name: str = ""


@dataclass(frozen=True)
class _PiperWorkload(OpenRecord):
    """Nodes and edges in the order of the file."""

    nodes: Annotated[tuple[_PiperNode, ...], Entries(1)]
    edges: tuple[_PiperEdge, ...]


@dataclass(frozen=True)
class _Layer:
    forward_s: float
    backward_s: float
    output_nbytes: int
    saved_nbytes: int
    params_nbytes: int


def is_piper(data: Mapping[str, Any]) -> bool:
    """Whether a workload in JSON is Piper's, not device placement's."""
    nodes = data["nodes"]
    return isinstance(nodes, list) and any(isinstance(n, dict) and "TMPCs" in n for n in nodes)


def piper_chain(source: Source, data: Any, unit_s: float) -> ChainCosts:
    """Return the chain of a Piper workload: each node's fastest costs without tensor parallelism.

    A time is for both passes, and the forward gets a third of it. Raises `CostError`.
    """
    workload = source.record(_PiperWorkload, data)
    _check_ids(source, workload.nodes, workload.edges)
    output_nbytes = _outputs(workload.edges)
    layers = {}
    for index, node in enumerate(workload.nodes):
        if "1" not in node.TMPCs:
            why = f"has the degrees {words(node.TMPCs) or 'none'}; give the costs of degree 1"
            raise source.fault(("nodes", index, "TMPCs"), why)
        costs = min(node.TMPCs["1"], key=lambda costs: costs.timePerSample)
        layers[node.id] = _Layer(
            FORWARD_SHARE * unit_s * costs.timePerSample,
            (1 - FORWARD_SHARE) * unit_s * costs.timePerSample,
            output_nbytes.get(node.id, 0),
            math.ceil(costs.memoryUsageA),
            math.ceil(costs.parameterSize),
        )
    return _chain(source, _names(workload.nodes), layers, dict(enumerate(workload.edges)))


def placement_chain(source: Source, data: Any, latency: Latency, unit_s: float) -> ChainCosts:
    """Return the chain of a training workload of device placement. Each forward node is a layer.

    The time of a backward node goes to the forward nodes of its colour class, in proportion to
    their times. Without such a class, its time goes to the layers that share the time of the
    nearest node. A node that takes no time and reads nothing is a parameter, and belongs to the
    layer of its first reader. If parameter nodes have bytes, no other bytes are parameters, and the
    bytes of other nodes are kept for the backward. Otherwise a node's bytes beyond its output are
    its parameters.

    A chain cannot express that a class must stay on one device. Nodes that load data count as
    layers, since the file does not mark them. Raises `CostError`.
    """
    workload = source.record(_Workload, data)
    _check_ids(source, workload.nodes, workload.edges)
    _check_passes(source, workload)
    if latency == "accelerator":
        for index, node in enumerate(workload.nodes):
            if not node.supportedOnFpga:
                why = 'is not supported on the accelerator; read it with latency="cpu"'
                raise source.fault(("nodes", index), why)
    times_s = {
        node.id: unit_s * (node.fpgaLatency if latency == "accelerator" else node.cpuLatency)
        for node in workload.nodes
    }
    forward = {node.id: node for node in workload.nodes if not node.isBackwardNode}
    edges = {index: edge for index, edge in enumerate(workload.edges) if edge.destId in forward}
    owners = _owners(forward, edges.values())
    backward_s = _backward_times(source, workload, owners, times_s)
    output_nbytes = _received_gradients(workload) | _outputs(workload.edges)
    own_params = dict.fromkeys(forward, 0)
    for id, owner in owners.items():
        if owner != id:
            own_params[owner] += math.ceil(forward[id].size)
    apart = any(own_params.values())  # parameters are separate nodes
    layers = {}
    for id, node in forward.items():
        if owners[id] != id:
            continue
        output, held = output_nbytes.get(id, 0), math.ceil(node.size)
        saved = max(held, output) if apart else output
        params = own_params[id] if apart else max(held - output, 0)
        layers[id] = _Layer(times_s[id], backward_s[id], output, saved, params)
    kept = {index: edge for index, edge in edges.items() if edge.sourceId in layers}
    return _chain(source, _names(workload.nodes), layers, kept)


def _owners(forward: Mapping[int, _Node], edges: Collection[_SizedEdge]) -> dict[int, int]:
    """Return the layer of each forward node: the node itself, or a parameter's first reader."""
    owners = {id: id for id in forward}
    readers = {edge.destId for edge in edges}
    places = {id: place for place, id in enumerate(forward)}
    for edge in sorted(edges, key=lambda edge: places[edge.destId], reverse=True):
        writer = forward[edge.sourceId]
        if writer.cpuLatency == writer.fpgaLatency == 0 and writer.id not in readers:
            owners[writer.id] = edge.destId
    return owners


def _backward_times(
    source: Source, workload: _Workload, owners: Mapping[int, int], times_s: Mapping[int, float]
) -> dict[int, float]:
    """Return the seconds of the layers' backwards."""
    classes: dict[int | None, dict[int, None]] = {}
    for node in workload.nodes:
        if not node.isBackwardNode and node.colorClass is not None:
            classes.setdefault(node.colorClass, {})[owners[node.id]] = None
    # A group of layers shares a backward's time: first groups of one layer, then the classes.
    groups: list[tuple[int, ...]] = [(owner,) for owner in owners.values()]
    group_of = {id: number for number, id in enumerate(owners)}
    backward = {n.id: n for n in workload.nodes if n.isBackwardNode}
    whole = {color: len(groups) + number for number, color in enumerate(classes)}
    groups += [tuple(members) for members in classes.values()]
    group_of |= {
        id: whole[node.colorClass] for id, node in backward.items() if node.colorClass in whole
    }
    touching: dict[int, list[int]] = {}
    for place, edge in enumerate(workload.edges):
        touching.setdefault(edge.sourceId, []).append(place)
        touching.setdefault(edge.destId, []).append(place)
    newest: Mapping[int, int] = group_of
    left = len(backward.keys() - group_of.keys())
    while left:
        near: dict[int, int] = {}
        for place in sorted({place for id in newest for place in touching.get(id, ())}):
            edge = workload.edges[place]
            for id, other in ((edge.sourceId, edge.destId), (edge.destId, edge.sourceId)):
                if id not in group_of and other in group_of:
                    near.setdefault(id, group_of[other])
        if not near:
            index = next(i for i, n in enumerate(workload.nodes) if n.id not in group_of)
            why = "is a backward node of no forward node; give it the colorClass of one"
            raise source.fault(("nodes", index), why)
        group_of |= near
        newest, left = near, left - len(near)
    group_s: dict[int, float] = {}
    for id in backward:
        group_s[group_of[id]] = group_s.get(group_of[id], 0.0) + times_s[id]
    backward_s = dict.fromkeys(owners.values(), 0.0)
    for number, time_s in group_s.items():
        weights = [times_s[layer] for layer in groups[number]]
        if not any(weights):
            weights = [1.0] * len(weights)
        total = sum(weights)
        for layer, weight in zip(groups[number], weights, strict=True):
            backward_s[layer] += time_s * weight / total
    return backward_s


def _outputs(edges: Iterable[_SizedEdge | _PiperEdge]) -> dict[int, int]:
    """Return, by node, the bytes of its largest edge: all edges of a node carry its output."""
    output_nbytes: dict[int, int] = {}
    for edge in edges:
        output_nbytes[edge.sourceId] = max(output_nbytes.get(edge.sourceId, 0), edge.nbytes)
    return output_nbytes


def _received_gradients(workload: _Workload) -> dict[int, int]:
    """Return, by node, the bytes of the gradients that the backward nodes of its class read.

    The bytes stand for the size of a forward node's output if no node reads that output.
    """
    nodes = {node.id: node for node in workload.nodes}
    by_class: dict[int | None, int] = {}
    for edge in workload.edges:
        writer, reader = nodes[edge.sourceId], nodes[edge.destId]
        if writer.isBackwardNode and writer.colorClass != reader.colorClass:
            nbytes = max(by_class.get(reader.colorClass, 0), edge.nbytes)
            by_class[reader.colorClass] = nbytes
    return {
        node.id: by_class[node.colorClass]
        for node in workload.nodes
        if node.colorClass is not None and node.colorClass in by_class
    }


def _check_ids(source: Source, nodes: Sequence[_Node | _PiperNode], edges: Sequence[_Edge]) -> None:
    places: dict[int, int] = {}
    for index, node in enumerate(nodes):
        if node.id in places:
            why = f"has the id {node.id} of nodes.{places[node.id]}; give each node its own"
            raise source.fault(("nodes", index), why)
        places[node.id] = index
    for index, edge in enumerate(edges):
        for id in (edge.sourceId, edge.destId):
            if id not in places:
                raise source.fault(("edges", index), f"names {id}, but no node has this id")


def _check_passes(source: Source, workload: _Workload) -> None:
    backward = {node.id for node in workload.nodes if node.isBackwardNode}
    if len(backward) in (0, len(workload.nodes)):
        which = "backward" if not backward else "forward"
        why = f"has no {which} node among {len(workload.nodes)}; give a workload of training"
        raise source.fault((), why)
    for index, edge in enumerate(workload.edges):
        if edge.sourceId in backward and edge.destId not in backward:
            why = f"goes from the backward node {edge.sourceId} to the forward node {edge.destId}"
            raise source.fault(("edges", index), f"{why}; turn it round")


def _names(nodes: Sequence[_Node | _PiperNode]) -> dict[int, str]:
    """Return names without spaces, by id. If two names are equal, every name gets its id."""
    names = {node.id: "_".join(node.name.split()) or f"node{node.id}" for node in nodes}
    if len(set(names.values())) == len(names):
        return names
    return {id: f"{name}.{id}" for id, name in names.items()}


def _chain(
    source: Source,
    names: Mapping[int, str],
    layers: Mapping[int, _Layer],
    edges: Mapping[int, _Edge],
) -> ChainCosts:
    """Return the chain of the layers in the order of `ProfileGraph`; `edges` are by index in the
    file."""
    places = {(names[e.sourceId], names[e.destId]): place for place, e in edges.items()}
    nodes = (
        ProfileNode(
            names[id],
            "",
            layer.forward_s,
            layer.backward_s,
            layer.output_nbytes,
            layer.params_nbytes,
        )
        for id, layer in layers.items()
    )
    graph = ProfileGraph(tuple(nodes), tuple(places))
    if circle := graph.circle():
        last = max(places[edge] for edge in circle)
        raise source.fault(("edges", last), f"closes a circle, {path_of(circle)}; remove it")
    chain = graph.chain()
    saved_nbytes = {names[id]: layer.saved_nbytes for id, layer in layers.items()}
    return replace(chain, activation_nbytes=tuple(saved_nbytes[name] for name in chain.names))
