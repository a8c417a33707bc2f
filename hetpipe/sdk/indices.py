"""Operators that read or write at the places of an index tensor, and bounds of their indices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from hetpipe.errors import BackendError
from hetpipe.sdk.graph import dtype_name, operator_name

IGNORED_CLASS = -100
"""The target that torch's losses ignore by default."""


Range = tuple[int, int, int | None]
"""(low, size, ignored): integers in low..size-1, or equal to `ignored`."""
_MOVES = frozenset(
    f"aten.{name}"
    for name in ("view", "_unsafe_view", "expand", "permute", "select", "slice", "squeeze",
                 "t", "transpose", "unsqueeze", "clone", "alias")
)  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """A rule for `node`: elements of `index` are in low..size-1, or equal `ignored`."""

    node: fx.Node
    index: fx.Node
    size: int
    low: int = 0
    ignored: int | None = None

    def error(self, device_id: str, index: int) -> BackendError:
        """Return the error for an index out of range."""
        layer = self.node.meta.get("layer", "?")
        return BackendError(
            f"{device_id}: {operator_name(self.node)} of layer {layer}: index {index} is out of "
            f"range for size {self.size}, where {self.low} to {self.size - 1} exist"
        )

    @property
    def holds(self) -> bool:
        """Whether the caller has already checked that no index is out of range."""
        source = self.index
        while source.op == "call_function" and operator_name(source).rpartition(".")[0] in _MOVES:
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


def index_bounds(node: fx.Node) -> list[Bound]:
    """Return the bounds that a call's index tensors must keep, except for checked ones."""
    rule = _RULES.get(operator_name(node).rpartition(".")[0])
    return [] if rule is None else [bound for bound in rule(node) if not bound.holds]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


def _rows(node: fx.Node) -> list[Bound]:
    """Return the bound of `embedding(weight, index)`."""
    weight, index = node.args[:2]
    assert isinstance(index, fx.Node)
    return [Bound(node, index, _shape(weight)[0])]


def _along(node: fx.Node) -> list[Bound]:
    """Return the bound of `gather(x, dim, index)` and similar calls; a 0-d tensor has one row."""
    x, dim, index = node.args[:3]
    assert isinstance(dim, int)
    assert isinstance(index, fx.Node)
    return [Bound(node, index, (_shape(x) or (1,))[dim])]


def _places(node: fx.Node) -> list[Bound]:
    """Return the bounds of `index(x, [index, ...])`, whose negative indices count from the end."""
    x, indices = node.args[:2]
    assert isinstance(indices, (list, tuple))
    tensors = ((d, index) for d, index in enumerate(indices) if isinstance(index, fx.Node))
    return [
        Bound(node, index, size, low=-size)
        for d, index in tensors
        if dtype_name(index.meta["val"].dtype) not in ("bool", "uint8")  # bool and uint8 are masks
        for size in [_shape(x)[d]]
    ]


def _classes(first: int) -> Callable[[fx.Node], list[Bound]]:
    """Return the rule for losses of classes, whose scores are argument `first`."""

    def rule(node: fx.Node) -> list[Bound]:
        x, target = node.args[first : first + 2]
        assert isinstance(target, fx.Node)
        if target.meta["val"].is_floating_point():  # probabilities of the classes
            return []
        shape, place = _shape(x), first + 4
        ignored: Any = node.kwargs.get("ignore_index", IGNORED_CLASS)
        ignored = node.args[place] if len(node.args) > place else ignored
        return [Bound(node, target, shape[min(1, len(shape) - 1)], ignored=ignored)]

    return rule


_RULES: dict[str, Callable[[fx.Node], list[Bound]]] = {
    "aten.embedding": _rows,
    **{
        f"aten.{name}": _along
        for name in ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select",
                     "index_add", "index_copy", "index_fill")
    },
    **{
        f"aten.{name}": _places
        for name in ("index", "_unsafe_index", "index_put", "_unsafe_index_put")
    },
    **{
        f"aten.{name}": _classes(0)
        for name in ("nll_loss_forward", "nll_loss2d_forward", "cross_entropy_loss")
    },
    **{f"aten.{name}": _classes(1) for name in ("nll_loss_backward", "nll_loss2d_backward")},
}  # fmt: skip
