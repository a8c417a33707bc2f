"""Finds the integers of a batch that are used as indices, and checks their bounds.

The graph shows which operators read a leaf as an index, also after operators that only move
elements. Devices disagree about an index out of range, so the host checks every batch before any
device reads the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from hetpipe.buckets import like
from hetpipe.capture.export.example import Array
from hetpipe.capture.flat_graph import FlatGraph, is_getitem, owner
from hetpipe.capture.program import INPUT, StageGraphs
from hetpipe.errors import HetpipeError
from hetpipe.sdk.graph import graph_inputs
from hetpipe.sdk.indices import MOVES, Range, all_bounds, arguments_of, name_of

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_CASTS = ("aten._to_copy", "aten.to")
_PADS = ("aten.pad", "aten.constant_pad_nd")
_PADDING = -1  # number of a padding element, which is from no leaf

MEAN = 1
"""torch's number for reduction="mean"."""


@dataclass(frozen=True)
class IndexBound:
    """Bounds of some elements of a leaf: each is in [low, high), or equals `ignored`."""

    leaf: str
    low: int
    high: int
    ignored: int | None
    columns: tuple[int, ...] | None
    """Positions of the used elements in a flattened sample; None for all elements."""
    use: str
    """Text for messages: "embedding of wte has 256 rows"."""
    averaged: bool = False
    """Whether the operator returns the mean over the elements that are not `ignored`."""

    def check(self, array: Array) -> None:
        """Raise `HetpipeError` for the first element out of bounds; `array` is batch-first."""
        values = self._used(array)
        columns = range(values.shape[1]) if self.columns is None else self.columns
        if values.size == 0 or (values.min() >= self.low and values.max() < self.high):
            return
        outside = (values < self.low) | (values >= self.high)
        if self.ignored is not None:
            outside &= values != self.ignored
        if not outside.any():
            return
        row, column = (int(index) for index in np.argwhere(outside)[0])
        place = (row, *map(int, np.unravel_index(columns[column], array.shape[1:])))
        unless = "" if self.ignored is None else f", or {self.ignored} to leave it out"
        raise HetpipeError(
            f"{self.leaf}[{', '.join(map(str, place))}] is {values[row, column]}, but {self.use}: "
            f"give {self.low}..{self.high - 1}{unless}"
        )

    def _used(self, array: Array) -> Array:
        """Return the used elements of each sample."""
        values = array.reshape(array.shape[0], -1)
        return values if self.columns is None else values[:, self.columns]

    def check_means(self, array: Array, sizes: Sequence[int]) -> None:
        """Raise `HetpipeError` if micro-batches of these sizes ignore different shares of labels.

        The mean over the mini-batch is then not the mean of the micro-batches' means.
        """
        if not self.averaged or self.ignored is None:
            return
        ignored = self._used(array) == self.ignored
        if not ignored.any():
            return
        starts = np.cumsum([0, *sizes[:-1]])
        counts = np.add.reduceat(ignored.sum(1), starts)
        shares = counts / np.asarray(sizes)
        if shares.min() == shares.max():
            return
        few, many = int(shares.argmin()), int(shares.argmax())
        name = self.use.partition(" ")[0]
        raise HetpipeError(
            f"{self.leaf} has {counts[few]} labels {self.ignored} in samples {starts[few]} to "
            f"{starts[few] + sizes[few] - 1} and {counts[many]} in samples {starts[many]} to "
            f"{starts[many] + sizes[many] - 1}: {name} returns the mean over the other labels, so "
            "the mean over the mini-batch is not the mean of its parts' means; let loss_fn return "
            f"(sum, count), as in ({name}(out, y, reduction='sum'), (y != {self.ignored}).sum()), "
            "or give microbatches=1"
        )


class Indices:
    """The bounds of a model's indices, by bucket: `bounds` has a size in each bucket."""

    def __init__(self, bounds: Mapping[int, Sequence[IndexBound]]) -> None:
        self._bounds = {like(0, size): own for size, own in bounds.items()}

    def of(self, size: int) -> Sequence[IndexBound]:
        """Return the bounds in batches of this size."""
        return self._bounds[like(0, size)]

    def check(self, leaves: Mapping[str, Array], size: int) -> None:
        """Raise `HetpipeError` for an index of a batch that is out of bounds."""
        for bound in self.of(size):
            if bound.leaf in leaves:
                bound.check(leaves[bound.leaf])

    def check_ignored(self, labels: Collection[str], value: int) -> None:
        """Raise `HetpipeError` unless a loss is known to leave out this value of the labels."""
        ignored = {bound.leaf for own in self._bounds.values() for bound in own
                   if bound.ignored == value}  # fmt: skip
        for name in sorted(set(labels) - ignored):
            raise HetpipeError(
                f"buckets would pad {name} with {value}, and it is not known that the loss leaves "
                f"out this label: give the value, as hp.Buckets(lengths, pad={{{name!r}: {value}}})"
            )

    def check_means(self, leaves: Mapping[str, Array], size: int, parts: Sequence[int]) -> None:
        """Check the labels of a batch's parts, see `IndexBound.check_means`."""
        for bound in self.of(size):
            bound.check_means(leaves[bound.leaf], parts)


def mark_checked(graphs: Sequence[StageGraphs], indices: Indices) -> None:
    """Mark the inputs of programs that the host checks, so that backends need not check them."""
    passes = (pair for stage in graphs for pair in stage.passes.items())
    for size, program in ((size, program) for size, pair in passes for program in pair.programs):
        ranges: dict[str, Range] = {}
        for bound in indices.of(size):
            if bound.columns is None:
                ranges.setdefault(bound.leaf, (bound.low, bound.high, bound.ignored))
        for slot, placeholder in zip(program.inputs, graph_inputs(program.graph), strict=True):
            if slot.role == INPUT and slot.name in ranges:
                placeholder.meta["checked"] = ranges[slot.name]


def index_bounds(flat: FlatGraph) -> tuple[IndexBound, ...]:
    """Return the bounds of the leaves of a batch whose elements reach an index unchanged."""
    follow = _LeafTracer(flat)
    bounds: dict[IndexBound, None] = {}
    for node in flat.graph.nodes:
        if node.op != "call_function" or is_getitem(node):
            continue
        for bound in all_bounds(node):
            reached = follow.to(bound.index)
            if reached is not None:
                leaf, columns = reached
                averages = bound.ignored is not None and arguments_of(node)["reduction"] == MEAN
                path = owner(node)[1]
                use = f"{_name(node)}{' of ' + path if path else ''} has {bound.size} {bound.noun}"
                limits = bound.low, bound.size, bound.ignored
                bounds[IndexBound(leaf, *limits, columns, use, averages)] = None
    return tuple(bounds)


class _LeafTracer:
    """Finds the elements of a leaf that reach a node: runs operators on the elements' numbers."""

    def __init__(self, flat: FlatGraph) -> None:
        self._flat = flat
        self._moved: dict[fx.Node, Any] = {}

    def to(self, node: Any) -> tuple[str, tuple[int, ...] | None] | None:
        """Return (leaf, columns) of the elements that reach the node; None if no leaf does."""
        source = self._source(node)
        if source is None:
            return None
        numbers = self._move(node).reshape(-1)
        used = torch.zeros(source.meta["val"].numel(), dtype=torch.bool)
        used[numbers[numbers != _PADDING]] = True
        rows = used.view(source.meta["val"].shape[0], -1)
        if not bool((rows == rows[0]).all()):  # the node reads different elements of each sample
            return None
        if not bool(rows[0].any()):
            return None
        whole = bool(rows[0].all())
        columns = None if whole else tuple(rows[0].nonzero().view(-1).tolist())
        return self._flat.inputs[source][1], columns

    def _source(self, node: Any) -> fx.Node | None:
        """Return the integer leaf whose elements the node holds."""
        while isinstance(node, fx.Node) and node.op == "call_function" and _moves(node):
            node = node.args[0]
        if not isinstance(node, fx.Node) or self._flat.inputs.get(node, ("", ""))[0] != INPUT:
            return None
        return node if node.meta["val"].dtype in _INTEGERS else None

    def _move(self, node: fx.Node) -> Any:
        if node not in self._moved:
            self._moved[node] = self._compute(node)
        return self._moved[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            shape = node.meta["val"].shape
            return torch.arange(shape.numel()).reshape(shape)
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        source, *how = node.args
        moved = self._move(source)  # type: ignore[arg-type]
        name = name_of(node)
        if name in _CASTS:
            return moved
        if name in _PADS:
            return torch.nn.functional.pad(moved, how[0], value=_PADDING)  # type: ignore[arg-type]
        if name in ("aten.view", "aten._unsafe_view"):
            return moved.reshape(how[0])
        return target(moved, *how, **node.kwargs)


def _moves(node: fx.Node) -> bool:
    """Return whether the node holds only elements of its first argument, or padding."""
    name, value = name_of(node), node.meta.get("val")
    if name in _CASTS:
        return value is not None and value.dtype in _INTEGERS
    if name == "aten.pad" and node.args[2:3] not in ((), ("constant",)):
        return False
    return is_getitem(node) or name in MOVES or name in _PADS


def _name(node: fx.Node) -> str:
    """Return the name by which a user calls the operator."""
    name = name_of(node).removeprefix("aten.")
    return {"cross_entropy_loss": "cross_entropy", "index": "indexing"}.get(
        name, name.removesuffix("_nd").removesuffix("_forward")
    )
