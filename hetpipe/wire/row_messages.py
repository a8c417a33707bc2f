"""Messages between stages whose replicas divide a micro-batch differently (stations 6 and 8 of
docs/life-of-a-micro-batch.md).

If two replicas of neighbouring stages compute the same rows, tensors travel whole, from device to
device. Otherwise the sender's host cuts out the rows that both replicas compute, and the receiver's
host joins the rows from several replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hetpipe.buckets import like
from hetpipe.errors import HetpipeError
from hetpipe.wire.shares import Replica, Rows, Shares, overlap
from hetpipe.wire.wire import Array, Axes, Content, Kind, Layout, host_dtype


class Route(NamedTuple):
    """A message to or from a replica of a neighbouring stage."""

    peer: Replica
    rows: Rows  # of the micro-batch
    kind: Kind


def routes(shares: Shares, own: Replica, stage: int, content: Content, samples: int) -> list[Route]:
    """Return a replica's routes to or from another stage, in the order of that stage's replicas."""
    mine = shares.rows(own, samples)
    overlapping = []
    for peer in shares.replicas(stage):
        theirs = shares.rows(peer, samples)
        lo, hi = overlap(mine, theirs)
        if lo < hi:
            overlapping.append(Route(peer, (lo, hi), kind_of(content, samples, mine, theirs)))
    return overlapping


def kind_of(content: Content, samples: int, one: Rows, other: Rows) -> Kind:
    """Return the kind of a message between two replicas that compute these rows of `samples`."""
    lo, hi = overlap(one, other)
    return Kind(content if one == other else content.some_rows, like(hi - lo, samples))


def find_axes(shapes: Iterable[tuple[str, int, tuple[int, ...]]]) -> dict[str, int]:
    """Return, for each tensor, the index of the dimension that has an entry per row.

    `shapes` has (name, rows, shape) for several numbers of rows. Raises `HetpipeError` for a tensor
    that cannot be divided by rows.
    """
    shapes_of: dict[str, dict[int, tuple[int, ...]]] = {}
    for name, rows, shape in shapes:
        shapes_of.setdefault(name, {})[rows] = shape
    return {name: _axis(name, by_rows) for name, by_rows in shapes_of.items()}


def _axis(name: str, shapes: Mapping[int, tuple[int, ...]]) -> int:
    ranks = {len(shape) for shape in shapes.values()}
    axes = [
        axis
        for axis in range(min(ranks))
        if all(shape[axis] == int(rows) for rows, shape in shapes.items())
    ]
    other_sizes = {
        (like(0, rows), *(size for a, size in enumerate(s) if a not in axes))
        for rows, s in shapes.items()
    }
    buckets = {like(0, rows) for rows in shapes}
    if len(ranks) != 1 or len(axes) != 1 or len(other_sizes) != len(buckets):
        listed = ", ".join(f"{list(s)} for {rows} samples" for rows, s in sorted(shapes.items()))
        raise HetpipeError(
            f"{name}, which crosses between stages, is {listed}: it is not clear which dimension "
            "has one row for each sample, so replicas cannot divide it; cut elsewhere, or give "
            "both stages the same shares"
        )
    return axes[0]


def rows_of(layout: Layout, axes: Axes, rows: int) -> Layout:
    """Return the layout of these tensors with `rows` rows."""
    slots = []
    for slot in layout:
        axis = axes[slot.name]
        shape = (*slot.shape[:axis], rows, *slot.shape[axis + 1 :])
        slots.append(replace(slot, shape=shape))
    return tuple(slots)


def cut(arrays: Sequence[Array], layout: Layout, axes: Axes, lo: int, hi: int) -> list[Array]:
    """Return rows lo..hi (hi excluded) of these tensors."""
    return [
        array[(slice(None),) * axes[slot.name] + (slice(lo, hi),)]
        for array, slot in zip(arrays, layout, strict=True)
    ]


def join(
    parts: Sequence[tuple[Rows, Sequence[Array]]], layout: Layout, axes: Axes, own: Rows
) -> list[Array]:
    """Join parts of a micro-batch that together cover the rows `own`."""
    whole = rows_of(layout, axes, own[1] - own[0])
    joined = [np.empty(slot.shape, host_dtype(slot.dtype)) for slot in whole]
    for (lo, hi), arrays in parts:
        places = cut(joined, whole, axes, lo - own[0], hi - own[0])
        for place, array in zip(places, arrays, strict=True):
            place[...] = array
    return joined
