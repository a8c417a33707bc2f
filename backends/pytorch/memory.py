"""Finds nodes that share storage, and lets a node reuse the storage of another node.

In a functional graph every node allocates its result. So every accumulation would cost a new
tensor, and an optimizer step would need memory for the parameters twice. Instead, if an elementwise
node is the last to read a value, it writes its result into the storage of the value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import OpOverload

ELEMENTWISE = frozenset((
    "abs", "add", "addcdiv", "addcmul", "bitwise_and", "bitwise_not", "bitwise_or", "ceil",
    "clamp", "clamp_max", "clamp_min", "cos", "div", "elu", "exp", "expm1", "floor", "fmod",
    "gelu", "gelu_backward", "hardtanh", "hardtanh_backward", "leaky_relu", "leaky_relu_backward",
    "lerp", "log", "log1p", "logical_and", "logical_not", "logical_or", "masked_fill", "maximum",
    "minimum", "mul", "neg", "pow", "reciprocal", "relu", "remainder", "round", "rsqrt", "rsub",
    "sigmoid", "sigmoid_backward", "sign", "silu", "silu_backward", "sin", "sqrt", "square",
    "sub", "tanh", "tanh_backward", "threshold_backward", "trunc", "where",
))  # fmt: skip
"""Operators that read only element i of operands of the result's shape to compute element i."""

ACCUMULATING = frozenset(("addmm", "baddbmm"))
"""Operators that read only element i of their first operand to compute element i."""

SHAPE_ONLY = frozenset(("zeros_like", "ones_like", "full_like", "empty_like"))
"""Operators that read the shape of their operand, not its values."""

HIDDEN_VIEWS = frozenset(("_unsafe_view", "_reshape_alias", "reshape", "contiguous", "flatten"))
"""Operators that may return their operand's storage although their schema does not say so."""

ROW_MAJOR = HIDDEN_VIEWS | {"alias", "squeeze", "unsqueeze", "view"}
"""Operators whose result is row-major if it has the storage of a row-major operand."""


def base_name(node: fx.Node) -> str:
    """Return `add` for a call of `aten.add.Tensor`, and "" for operators outside aten."""
    target = node.target
    if isinstance(target, OpOverload) and target.namespace == "aten":
        return str(target._schema.name).removeprefix("aten::")
    return ""


def returns_view(node: fx.Node) -> bool:
    """Return whether the result may share its first operand's storage."""
    if not isinstance(node.target, OpOverload):
        return False
    returns = node.target._schema.returns
    return base_name(node) in HIDDEN_VIEWS or any(r.alias_info is not None for r in returns)


class Storages:
    """The nodes that share storage: the root of each node, and the members of each root."""

    def __init__(self, graph: fx.Graph, donated: frozenset[fx.Node]) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.root: dict[fx.Node, fx.Node] = {}
        self.members: dict[fx.Node, list[fx.Node]] = {}
        self.overwritten: set[fx.Node] = set()
        """The inputs that stand for a result, because the result is in their storage."""
        self.strided: set[fx.Node] = set()
        """The nodes that may be views with gaps, or with dimensions in another order."""
        self._donated = donated

    def add(self, node: fx.Node, into: fx.Node | None = None) -> None:
        """Add a node; with `into`, the node writes into the storage of `into`."""
        source = into or self._source(node)
        root = node if source is None else self.root[source]
        self.root[node] = root
        self.members.setdefault(root, []).append(node)
        keeps_order = into is not None or base_name(node) in ROW_MAJOR
        if source is not None and (source in self.strided or not keeps_order):
            self.strided.add(node)

    def _source(self, node: fx.Node) -> fx.Node | None:
        if node.target is operator.getitem:
            parent = node.args[0]
            assert isinstance(parent, fx.Node)
            return parent if returns_view(parent) else None
        return node.all_input_nodes[0] if returns_view(node) else None

    def writable(self, root: fx.Node) -> bool:
        """Return whether the graph may overwrite this storage."""
        return root.op == "call_function" or root in self._donated

    def promised(self, node: fx.Node) -> bool:
        """Return whether a shape-only node has an operand in this storage, and so may take it."""
        members = self.members[self.root[node]]
        return any(base_name(user) in SHAPE_ONLY for member in members for user in member.users)

    def dead_after(self, node: fx.Node, at: fx.Node) -> bool:
        """Return whether no value in `node`'s storage is read after `at`."""
        now = self.position[at]
        for member in self.members[self.root[node]]:
            for user in member.users:
                if self.position[user] > now and base_name(user) not in SHAPE_ONLY:
                    return False
        return True


def sink_shape_only(graph: fx.Graph) -> None:
    """Move each `SHAPE_ONLY` node to just before the first node that uses it."""
    output = graph.output_node()
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and base_name(node) in SHAPE_ONLY:
            users = set(node.users)
            first = next((n for n in graph.nodes if n in users), output)
            first.prepend(node)


def write_in_place(graph: fx.Graph, donated: frozenset[fx.Node]) -> Storages:
    """Rewrite each elementwise node to overwrite an operand that no later node reads."""
    storages = Storages(graph, donated)
    for node in graph.nodes:
        if node.op != "output":
            place(node, storages)
    return storages


def place(node: fx.Node, storages: Storages) -> None:
    """Give a node storage: an operand's if the node may overwrite it, else new storage.

    If the node overwrites no input, or only a strided view of an input, `meta["functional"]` keeps
    the operator that overwrites nothing.
    """
    victim = _victim(node, storages) if node.op == "call_function" else None
    functional = torch.ops.aten.fill.Scalar if base_name(node) in SHAPE_ONLY else node.target
    if victim is not None and _overwrite(node, victim):
        if storages.root[victim].op == "call_function" or victim in storages.strided:
            node.meta["functional"] = functional
        storages.add(node, victim)
    else:
        storages.add(node)


def _victim(node: fx.Node, storages: Storages) -> fx.Node | None:
    """Return the operand whose storage the result of `node` can take, or None."""
    name = base_name(node)
    if name in ACCUMULATING:
        candidates = [n for n in node.args[:1] if isinstance(n, fx.Node)]
    elif name in ELEMENTWISE or name in SHAPE_ONLY:
        candidates = list(node.all_input_nodes)
    else:
        return None
    free = [n for n in candidates if can_take(node, n, storages)]
    if any(user.op == "output" for user in node.users) and name not in SHAPE_ONLY:
        # Prefer storage that no shape-only node, such as an accumulator's zeros, can take.
        free.sort(key=storages.promised)
    return free[0] if free else None


def can_take(node: fx.Node, operand: fx.Node, storages: Storages) -> bool:
    """Return whether the result of `node` may overwrite an operand."""
    result, value, root = node.meta["val"], operand.meta["val"], storages.root[operand]
    return (
        storages.writable(root)
        and isinstance(value, torch.Tensor)
        and (value.shape, value.dtype) == (result.shape, result.dtype)
        and _covers(value, root.meta["val"])
        and all(o is operand or storages.root[o] is not root for o in node.all_input_nodes)
        and storages.dead_after(operand, node)
    )


def _covers(value: torch.Tensor, root: Any) -> bool:
    """Return whether a view has as many elements as its root; an expanded view has more."""
    return isinstance(root, torch.Tensor) and value.numel() == root.numel()


def _overwrite(node: fx.Node, victim: fx.Node) -> bool:
    """Turn `node` into an in-place or `out=` call; return False if the operator has neither."""
    name = base_name(node)
    if name in ("zeros_like", "full_like", "ones_like"):
        value = {"zeros_like": 0, "ones_like": 1}.get(name)
        node.args = (victim, node.args[1] if value is None else value)
        node.kwargs = {}
        node.target = torch.ops.aten.fill_.Scalar
        return True
    if name in SHAPE_ONLY:
        return False
    if node.args and node.args[0] is victim:
        in_place = _same_call(node, f"{name}_", extra=0)
        if in_place is not None:
            node.target = in_place[0]
            return True
    out = _same_call(node, name, extra=1)
    if out is None:
        return False
    node.target = out[0]
    node.kwargs = {**node.kwargs, out[1]: victim}
    return True


def _same_call(node: fx.Node, packet: str, extra: int) -> tuple[OpOverload, str] | None:
    """Return an overload of `packet` and the name of its last argument, or None.

    The overload has the arguments of `node` and `extra` more. It writes exactly one argument.
    """
    overloads = getattr(torch.ops.aten, packet, None)
    assert isinstance(node.target, OpOverload)
    needed = [(a.name, str(a.type)) for a in node.target._schema.arguments]
    for overload in overloads.overloads() if overloads is not None else ():
        candidate: OpOverload = getattr(overloads, overload)
        arguments = candidate._schema.arguments
        have = [(a.name, str(a.type)) for a in arguments]
        written = sum(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        if written == 1 and have[: len(needed)] == needed and len(have) == len(needed) + extra:
            return candidate, have[-1][0]
    return None


STRIDED = frozenset((
    "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "_to_copy",
    "addmm", "argmax", "argmin", "baddbmm", "bmm", "cat", "constant_pad_nd", "contiguous",
    "convolution", "convolution_backward", "copy", "embedding", "embedding_dense_backward", "flip",
    "full_like", "gather", "index", "index_select", "mm", "mv", "ones_like", "repeat",
    "select_backward", "slice_backward", "sort", "stack", "topk", "zeros_like",
))  # fmt: skip
"""Operators that read strided operands correctly, so that a copy would only cost time.

Pointwise operators and reductions also read strides, but torch tags them, so none is listed.
"""

DENSE_VIEWS = frozenset((torch.ops.aten.view_as_complex.default, torch.ops.aten.view.dtype))
"""Views that torch makes only of tensors whose last dimension has no gaps."""


Function = TypeVar("Function", bound=Callable[..., Any])


def strided(function: Function) -> Function:
    """Mark a function that may replace an operator and reads operands of any strides."""
    vars(function)["reads_strides"] = True
    return function


def needs_row_major(node: fx.Node) -> bool:
    """Return whether a call needs row-major operands; Python functions do unless `strided`.

    Many of torch's kernels ignore strides. Eager autograd makes a gradient contiguous before it
    calls such a kernel. A captured graph has no strides, so these copies are dropped, and the
    backend makes the operands contiguous itself.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        return not getattr(target, "reads_strides", False)
    if target in DENSE_VIEWS:
        return True
    return not (target._schema.is_mutable or returns_view(node) or reads_strides(target))


def reads_strides(target: OpOverload) -> bool:
    if target.namespace == "hetpipe":
        return True
    tags = {torch.Tag.pointwise, torch.Tag.reduction}
    name = str(target._schema.name).removeprefix("aten::")
    return not tags.isdisjoint(target.tags) or name in STRIDED
