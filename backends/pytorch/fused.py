"""Fuses equal elementwise operators of independent tensors: an optimizer's step in few launches.

An update applies one formula to every parameter. The fused program goes through the formula once:
each operator is one `torch._foreach` call on the tensors of all parameters. The calls write in
place. If no operand is free, a call writes into storage that no later node reads, such as a
gradient's. If there is no such storage either, the call allocates its results.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from .memory import (
    ELEMENTWISE,
    SHAPE_ONLY,
    Storages,
    base_name,
    can_take,
    place,
)

aten = torch.ops.aten

BLOCKS = 2
"""Blocks of parameters, if fused results need further memory; they exist for a block at a time."""

_LIST, _SHARED, _NUMBER, _NUMBERS = "List[Tensor]", "Tensor", "number", "List[number]"

_SWAPPABLE = frozenset(("add", "maximum", "minimum", "mul"))
_SECOND = _SWAPPABLE | {"div"}
"""Operators that may overwrite their second operand: x / y is the product of 1 / y and x."""


def is_elementwise(graph: fx.Graph) -> bool:
    """Return whether every operator is elementwise, a reduction or a constant, as in an update."""
    free = {torch.Tag.pointwise, torch.Tag.reduction}
    return all(
        base_name(node) in ELEMENTWISE | SHAPE_ONLY
        or not free.isdisjoint(getattr(node.target, "tags", ()))
        for node in graph.nodes
        if node.op == "call_function"
    )


def fuse(graph: fx.Graph, donated: frozenset[fx.Node], blocks: int) -> tuple[Storages, int]:
    """Fuse a graph for which `is_elementwise` holds, and let its nodes write in place.

    Return the storages, and the bytes of temporary fused results that needed new storage. The
    program computes `blocks` blocks of parameters, one after another.
    """
    _normalise(graph)
    groups, output = _groups(graph, blocks), graph.output_node()
    for nodes in groups:
        for node in nodes:
            output.prepend(node)
    fusion = _Fusion(graph, donated)
    for nodes in groups:
        fusion.add(nodes)
    return fusion.storages, fusion.allocated_nbytes()


def _normalise(graph: fx.Graph) -> None:
    """Write products and sums with a tensor without dimensions as torch's `_foreach` takes them."""
    for node in list(graph.nodes):
        if node.target is aten.addcmul.default:
            _split(graph, node)
        elif node.target is aten.sub.Tensor and _is_shared(node.args[1], node):
            node.kwargs = {"alpha": -node.kwargs.get("alpha", 1)}
            node.target = aten.add.Tensor
        elif base_name(node) in _SWAPPABLE and _is_shared(node.args[0], node) and not node.kwargs:
            node.args = node.args[::-1]


def _split(graph: fx.Graph, node: fx.Node) -> None:
    """Replace an `addcmul`, if a factor has no dimensions, by a product and a sum."""
    base, *factors = node.args
    factors.sort(key=lambda factor: _is_shared(factor, node))
    if _is_shared(factors[1], node):
        with graph.inserting_before(node):
            product = graph.call_function(aten.mul.Tensor, tuple(factors))
        product.meta = dict(node.meta)
        node.args = (base, product)
        node.kwargs = {"alpha": node.kwargs.get("value", 1)}
        node.target = aten.add.Tensor


def _is_shared(operand: Any, node: fx.Node) -> bool:
    """Return whether an operand has no dimensions, but the result has some."""
    return isinstance(operand, fx.Node) and not _dims(operand) and _dims(node) > 0


def _dims(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.dim() if isinstance(value, torch.Tensor) else 0


def _groups(graph: fx.Graph, blocks: int) -> list[list[fx.Node]]:
    """Return the calls of a graph in a new order, as lists of nodes that may be one call.

    The nodes of a list are equally far from the inputs, so none depends on another. Zeros for the
    next gradients come last, so that other results can use their storage before.
    """
    output, block_of = graph.output_node(), _blocks(graph, blocks)
    order: dict[fx.Node, tuple[int, float]] = {}
    groups: dict[tuple[tuple[int, float], Hashable], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node is output:
            continue
        before = [order[operand] for operand in node.all_input_nodes]
        block = max([block_of.get(node, 0), *(number for number, _ in before)])
        depth = 1 + max((depth for number, depth in before if number == block), default=0)
        if base_name(node) in SHAPE_ONLY and set(node.users) == {output}:
            depth = math.inf
        order[node] = block, depth
        if node.op == "call_function":
            groups[order[node], _form(node) or node].append(node)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def _blocks(graph: fx.Graph, blocks: int) -> dict[fx.Node, int]:
    """Return the block of each node with dimensions; blocks have about equal numbers of bytes."""
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node in graph.nodes:
        if node.op != "output" and _dims(node):
            parent[node] = node
            for operand in node.all_input_nodes:
                if operand in parent:
                    parent[root(operand)] = node
    sizes: dict[fx.Node, int] = defaultdict(int)
    for node in parent:
        sizes[root(node)] += node.meta["val"].nbytes
    number, before, total = dict[fx.Node, int](), 0, sum(sizes.values())
    for node, size in sizes.items():
        number[node] = (before + size // 2) * blocks // max(1, total)
        before += size
    return {node: number[root(node)] for node in parent}


def _form(node: fx.Node) -> Hashable | None:
    """Return a key that is equal for nodes that one `_foreach` call computes; None if none does."""
    value, name = node.meta["val"], base_name(node)
    if name not in ELEMENTWISE and name != "zeros_like":
        return None
    operands = [n for n in node.all_input_nodes if not _is_shared(n, node)]
    alike = all(
        n.meta["val"].is_contiguous()
        and (n.meta["val"].shape, n.meta["val"].dtype) == (value.shape, value.dtype)
        for n in (node, *operands)
    )
    if not operands or not alike:
        return None
    kinds = _kinds([node])
    if name != "zeros_like" and _overload(f"_foreach_{name}_", kinds) is None:
        return None
    arguments = tuple(
        argument if kind == _SHARED else kind
        for kind, argument in zip(kinds, node.args, strict=True)
    )
    return name, arguments, tuple(node.kwargs.items()), value.dtype, value.dim() > 0


def _kinds(nodes: Sequence[fx.Node]) -> list[str]:
    """Return the type of each argument of the `_foreach` call that computes these nodes."""
    kinds = []
    for arguments in zip(*(node.args for node in nodes), strict=True):
        if isinstance(arguments[0], fx.Node):
            kinds.append(_SHARED if _is_shared(arguments[0], nodes[0]) else _LIST)
        else:
            kinds.append(_NUMBER if len(set(arguments)) == 1 else _NUMBERS)
    return kinds


def _overload(packet: str, kinds: Sequence[str]) -> OpOverload | None:
    """Return the operator of a packet whose first arguments have these types, or None."""
    overloads = getattr(aten, packet, None)
    for name in overloads.overloads() if overloads is not None else ():
        overload: OpOverload = getattr(overloads, name)
        types = [str(argument.type) for argument in overload._schema.arguments]
        if types[: len(kinds)] == list(kinds):
            return overload
    return None


class _Fusion:
    """A graph under fusion, whose groups of nodes come in order."""

    def __init__(self, graph: fx.Graph, donated: frozenset[fx.Node]) -> None:
        self.storages = Storages(graph, donated)
        self._graph = graph
        self._allocated: list[fx.Node] = []
        self._by_form: dict[Any, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "placeholder":
                self.storages.add(node)
                self._by_form[node.meta["val"].shape, node.meta["val"].dtype].append(node)

    def allocated_nbytes(self) -> int:
        """Return the bytes of fused results in new storage that the graph does not return."""
        root = self.storages.root
        returned = {root[node] for node in self._graph.output_node().all_input_nodes}
        return sum(n.meta["val"].nbytes for n in self._allocated if n not in returned)

    def add(self, nodes: list[fx.Node]) -> None:
        """Compute the nodes of a group by as few calls as their storage allows."""
        if len(nodes) == 1 or _form(nodes[0]) is None:
            for node in nodes:
                place(node, self.storages)
            return
        read = [n for node in nodes for n in node.all_input_nodes]
        times_read = Counter(self.storages.root[operand] for operand in read)
        by_victim: dict[int | None, list[fx.Node]] = defaultdict(list)
        for node in nodes:
            by_victim[self._victim(node, nodes[-1], times_read)].append(node)
        for victim, some in by_victim.items():
            self._compute(some, victim, set(times_read))

    def _victim(self, node: fx.Node, last: fx.Node, times_read: Counter[fx.Node]) -> int | None:
        """Return the number of the argument that the result may overwrite, or None."""
        storages, name = self.storages, base_name(node)
        # A result leaves storage to zeros for the next gradients, if they are to take it.
        is_result = self._graph.output_node() in node.users and name not in SHAPE_ONLY
        for number in (0, 1) if name in _SECOND else (0,):
            operand = node.args[number] if number < len(node.args) else None
            if (
                isinstance(operand, fx.Node)
                and can_take(node, operand, storages)
                and storages.dead_after(operand, last)
                and times_read[storages.root[operand]] == 1
                and not (is_result and storages.promised(operand))
            ):
                return number
        return None

    def _compute(self, nodes: list[fx.Node], victim: int | None, read: set[fx.Node]) -> None:
        """Compute nodes into argument `victim`, or else into unused storage, or new storage."""
        name, kinds, arguments = base_name(nodes[0]), _kinds(nodes), _arguments(nodes)
        into = self._unused(nodes, read) if victim is None else arguments[victim]
        if into is None and name == "zeros_like":
            for node in nodes:
                place(node, self.storages)
            return
        if into is None:
            call = self._call(nodes, f"_foreach_{name}", kinds, arguments, nodes[0].kwargs)
            for number, node in enumerate(nodes):
                node.target, node.args, node.kwargs = operator.getitem, (call, number), {}
                self.storages.add(node)
                self._by_form[node.meta["val"].shape, node.meta["val"].dtype].append(node)
            self._allocated += nodes if _dims(nodes[0]) else []
            return
        if name == "zeros_like":
            self._call(nodes, "_foreach_zero_", [_LIST], [into])
        elif victim == 1:
            if name == "div":
                self._call(nodes, "_foreach_reciprocal_", [_LIST], [into])
            elif (factor := nodes[0].kwargs.get("alpha", 1)) != 1:
                self._call(nodes, "_foreach_mul_", [_LIST, _NUMBER], [into, factor])
            name = "mul" if name == "div" else name
            self._call(nodes, f"_foreach_{name}_", kinds, [into, arguments[0]], {})
        else:
            if victim is None:
                self._call(nodes, "_foreach_copy_", [_LIST, _LIST], [into, arguments[0]])
            self._call(nodes, f"_foreach_{name}_", kinds, [into, *arguments[1:]], nodes[0].kwargs)
        for node, storage in zip(nodes, into, strict=True):
            node.replace_all_uses_with(storage)
            if storage.op == "placeholder":
                self.storages.overwritten.add(storage)
            self._graph.erase_node(node)

    def _call(
        self,
        nodes: list[fx.Node],
        packet: str,
        kinds: list[str],
        arguments: list[Any],
        kwargs: Mapping[str, Any] = {},
    ) -> fx.Node:
        """Add a call for nodes to the graph."""
        overload = _overload(packet, kinds)
        assert overload is not None, packet
        with self._graph.inserting_before(nodes[0]):
            call = self._graph.call_function(overload, tuple(arguments), dict(kwargs))
        call.meta = dict(nodes[0].meta)
        self.storages.position[call] = self.storages.position[nodes[-1]]
        return call

    def _unused(self, nodes: list[fx.Node], read: set[fx.Node]) -> list[fx.Node] | None:
        """Return storage for each node that neither its group nor a later node reads, or None."""
        storages, found = self.storages, dict[fx.Node, None]()
        if not _dims(nodes[0]) or any(map(_becomes_result, nodes)):
            return None  # a new number takes less time than a copy, and a result may be new
        for node in nodes:
            value = node.meta["val"]
            unused = (
                root
                for root in self._by_form[value.shape, value.dtype]
                if root not in read
                and root not in found
                and storages.writable(root)
                and storages.dead_after(root, nodes[-1])
            )
            if (root := next(unused, None)) is None:
                return None
            found[root] = None
        return list(found)


def _becomes_result(node: fx.Node) -> bool:
    """Return whether a value is a result of the graph, or later nodes overwrite it with one."""
    if base_name(node) in SHAPE_ONLY:  # any storage is good for zeros
        return False
    while all(user.op != "output" for user in node.users):
        user = next(iter(node.users), None)
        if user is None or len(node.users) > 1 or user.args[0] is not node:
            return False
        if base_name(user) not in ELEMENTWISE:
            return False
        node = user
    return True


def _arguments(nodes: Sequence[fx.Node]) -> list[Any]:
    """Return the arguments of the `_foreach` call that computes these nodes."""
    columns = zip(*(node.args for node in nodes), strict=True)
    return [
        list(column) if kind in (_LIST, _NUMBERS) else column[0]
        for kind, column in zip(_kinds(nodes), columns, strict=True)
    ]
