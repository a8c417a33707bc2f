"""Operators that read or write where an index tensor says, and the bounds of the indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from hetpipe.errors import BackendError
from hetpipe.sdk.graph import dtype_name, operator_name

Range = tuple[int, int, int | None]
"""(low, size, ignored): each integer is in low..size-1, or equal to `ignored`."""
MOVES = frozenset(
    f"aten.{name}"
    for name in ("alias", "chunk", "clone", "contiguous", "detach", "expand", "flatten", "flip",
                 "movedim", "narrow", "permute", "repeat", "reshape", "roll", "select", "slice",
                 "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten",
                 "unsqueeze", "_unsafe_view", "view")
)  # fmt: skip
"""Operators that only move the elements of their first argument."""


@dataclass(frozen=True)
class Bound:
    """A rule for `node`: elements of `index` are in low..size-1, or equal to `ignored`.

    `noun` names the things that `size` counts.
    """

    node: fx.Node
    index: fx.Node
    size: int
    low: int = 0
    ignored: int | None = None
    noun: str = "rows"

    def error(self, device_id: str, index: int) -> BackendError:
        """Return the error for an index out of range."""
        layer = self.node.meta.get("layer", "?")
        return BackendError(
            f"{device_id}: {operator_name(self.node)} of layer {layer}: index {index} is out of "
            f"range for size {self.size}, where {self.low} to {self.size - 1} exist"
        )

    @property
    def holds(self) -> bool:
        """Whether all indices were checked before the graph runs (`meta["checked"]`)."""
        source = self.index
        while source.op == "call_function" and name_of(source) in MOVES:
            source = source.all_input_nodes[0]
        low, size, ignored = source.meta.get("checked", (-math.inf, math.inf, None))
        return low >= self.low and size <= self.size and ignored in (None, self.ignored)

    def check(self, device_id: str, indices: np.ndarray[Any, Any]) -> None:
        """Raise `BackendError` for the first of `indices` that is out of range."""
        outside = (indices < self.low) | (indices >= self.size)
        if self.ignored is not None:
            outside &= indices != self.ignored
        if outside.any():
            raise self.error(device_id, int(indices[outside].flat[0]))


def name_of(node: fx.Node) -> str:
    """Return the name of a call's operator without its overload: `aten.add`."""
    return operator_name(node).rpartition(".")[0]


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults included."""
    schema: Any = node.target._schema  # type: ignore[union-attr] # an operator
    values = {argument.name: argument.default_value for argument in schema.arguments}
    return {**values, **dict(zip(values, node.args, strict=False)), **node.kwargs}


def index_bounds(node: fx.Node) -> list[Bound]:
    """Return the bounds of a call's index tensors that were not checked before the graph runs."""
    return [bound for bound in all_bounds(node) if not bound.holds]


def all_bounds(node: fx.Node) -> list[Bound]:
    """Return the bounds that a call's index tensors must keep."""
    rule = _RULES.get(name_of(node))
    return [] if rule is None else list(rule(node, arguments_of(node)))


def _rows(node: fx.Node, arguments: dict[str, Any]) -> Iterator[Bound]:
    yield Bound(node, arguments["indices"], _shape(arguments["weight"])[0])


def _along(node: fx.Node, arguments: dict[str, Any]) -> Iterator[Bound]:
    """Yield the bound of `gather(x, dim, index)` and similar calls; a 0-d tensor has one row."""
    dim = arguments["dim"]
    size = (_shape(arguments["self"]) or (1,))[dim]
    low = -size if name_of(node) == "aten.index_fill" else 0  # index_fill takes negative indices
    yield Bound(node, arguments["index"], size, low, noun=f"entries in dimension {dim}")


def _places(node: fx.Node, arguments: dict[str, Any]) -> Iterator[Bound]:
    """Yield the bounds of `index(x, [index, ...])`, whose negative indices count from the end."""
    pairs = zip(arguments["indices"], _shape(arguments["self"]), strict=False)
    for dim, (index, size) in enumerate(pairs):
        # Index tensors of bool and uint8 are masks.
        if index is not None and dtype_name(index.meta["val"].dtype) not in ("bool", "uint8"):
            yield Bound(node, index, size, -size, noun=f"entries in dimension {dim}")


def _one_hot(node: fx.Node, arguments: dict[str, Any]) -> Iterator[Bound]:
    if arguments["num_classes"] > 0:
        yield Bound(node, arguments["self"], arguments["num_classes"], noun="classes")


def _classes(node: fx.Node, arguments: dict[str, Any]) -> Iterator[Bound]:
    """Yield the bound of a classification loss, unless its target has probabilities (floats)."""
    shape, target = _shape(arguments["self"]), arguments["target"]
    if not target.meta["val"].is_floating_point():
        classes, ignored = shape[min(1, len(shape) - 1)], int(arguments["ignore_index"])
        yield Bound(node, target, classes, ignored=ignored, noun="classes")


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


_RULES: dict[str, Callable[[fx.Node, dict[str, Any]], Iterator[Bound]]] = {
    f"aten.{name}": rule
    for rule, names in (
        (_rows, "embedding embedding_bag"),
        (_along, "gather scatter scatter_add scatter_reduce index_select index_add index_copy "
                 "index_fill"),
        (_places, "index _unsafe_index index_put _unsafe_index_put"),
        (_one_hot, "one_hot"),
        (_classes, "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d nll_loss_forward "
                   "nll_loss2d_forward nll_loss_backward nll_loss2d_backward"),
    )
    for name in names.split()
}  # fmt: skip
