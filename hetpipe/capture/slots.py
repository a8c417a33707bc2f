"""Builds programs from parts of larger graphs: extraction, simplification, slots."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from hetpipe.capture.program import (
    BUFFER,
    CONSTANT,
    CUT,
    GRAD,
    INPUT,
    PARAM,
    RNG,
    SAVED,
    TANGENT,
    Program,
    Slot,
)
from hetpipe.sdk.graph import canonical, dtype_name
from hetpipe.sdk.host.parts import extract, reachable

aten = torch.ops.aten
Key = tuple[str, str]
"""(role, name) of a slot."""

FORWARD_ORDER = (PARAM, BUFFER, CONSTANT, INPUT, CUT, RNG)
BACKWARD_ORDER = (PARAM, BUFFER, CONSTANT, RNG, INPUT, CUT, SAVED, TANGENT, GRAD)
"""The roles of a pass's inputs, in their order."""

_IDENTITIES = frozenset(
    {
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,  # programs have no layouts
        aten.lift_fresh_copy.default,
        aten.lift_fresh.default,
    }
)
_IDENTITIES_IF_SAME = frozenset(
    {
        aten._to_copy.default,
        aten.copy.default,  # returns its second argument
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
    }
)
_ASSERTIONS = frozenset(
    {
        aten._assert_tensor_metadata.default,
        aten._assert_async.msg,
        aten._assert_scalar.default,
        aten.sym_constrain_range_for_size.default,
    }
)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Return the graph's inputs in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def results(graph: fx.Graph) -> list[Any]:
    """Return the graph's results in order: nodes, or constants."""
    returned: Any = graph.output_node().args[0]
    return list(returned)


def is_tensor(node: fx.Node) -> bool:
    """Return whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def node_nbytes(node: fx.Node) -> int:
    """Return the bytes of a tensor node."""
    value = node.meta["val"]
    return int(value.numel()) * int(value.element_size())


def constant_name(name: str, value: torch.Tensor) -> str:
    """Return `name` with a digest of the value, which may differ between batch sizes and modes."""
    digest = hashlib.sha256(f"{value.dtype}{list(value.shape)}".encode())
    digest.update(value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return f"{name}.{digest.hexdigest()[:12]}"


def drop_assertions(graph: fx.Graph) -> None:
    """Drop the nodes that only check a value."""
    for node in list(graph.nodes):
        if node.target in _ASSERTIONS:
            graph.erase_node(node)


def drop_dead(graph: fx.Graph) -> None:
    """Drop assertions and dead code."""
    drop_assertions(graph)
    graph.eliminate_dead_code()


def simplify(graph: fx.Graph) -> None:
    """Drop dead code and identities. Call this only after autograd, when detach is an identity."""
    for node in list(graph.nodes):
        source: Any = node.args[node.target is aten.copy.default] if node.args else None
        if node.target in _IDENTITIES or (
            node.target in _IDENTITIES_IF_SAME and has_same_form(node, source)
        ):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        elif (
            node.target is aten._to_copy.default  # a cast that undoes the lossless cast before it
            and widens(source)
            and has_same_form(node, source.args[0])
        ):
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
    drop_dead(graph)


def widens(node: Any) -> bool:
    """Return whether the node casts a floating dtype to one that holds all its numbers."""
    if not isinstance(node, fx.Node) or node.target is not aten._to_copy.default:
        return False
    narrow, wide = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
    return bool(narrow.is_floating_point and torch.promote_types(narrow, wide) == wide != narrow)


def has_same_form(node: fx.Node, source: Any) -> bool:
    """Return whether both nodes have the same shape and dtype."""
    a, b = node.meta["val"], source.meta["val"]
    return bool(a.dtype == b.dtype and a.shape == b.shape)


def sort_by_role(
    pairs: Iterable[tuple[Key, fx.Node]], order: tuple[str, ...]
) -> list[tuple[Key, fx.Node]]:
    """Sort pairs by role; pairs of one role keep their order."""
    return sorted(pairs, key=lambda pair: order.index(pair[0][0]))


def make_program(
    source: fx.Graph,
    inputs: Sequence[tuple[Key, fx.Node]],
    outputs: Sequence[tuple[Key, fx.Node]],
) -> Program:
    """Return the program that computes `outputs`; it drops the `inputs` that it does not need."""
    needed = reachable([node for _, node in outputs], [node for _, node in inputs])
    used = [(key, node) for key, node in inputs if node in needed]
    graph = extract(source, [node for _, node in used], [node for _, node in outputs])
    for (key, _), placeholder in zip(used, placeholders(graph), strict=True):
        placeholder.meta["steady"] = key[0] in (PARAM, CONSTANT)
    return Program(
        canonical(graph),
        tuple(slot_of(key, node) for key, node in used),
        tuple(slot_of(key, node) for key, node in outputs),
    )


def slot_of(key: Key, node: fx.Node) -> Slot:
    """Return the slot of a tensor node."""
    value = node.meta["val"]
    return Slot(key[0], key[1], tuple(int(n) for n in value.shape), dtype_name(value.dtype))
