"""The values of a training, by the names of the model or of its graphs, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from hetpipe.checkpoint.tensors import Array, Outline, Tensors
from hetpipe.wire.wire import host_dtype

if TYPE_CHECKING:
    from hetpipe.capture.passes.split_layers import SplitParameters
    from hetpipe.crew.crew import Crew


def present(
    crew: Crew, others: Mapping[str, Mapping[str, Array]], parts: SplitParameters, role: str
) -> Tensors:
    """Return the values of a role by the model's names. `others` has, by role and by the
    graphs' names, the values that no worker has."""
    unread = others.get(role, {})
    slots = crew.slots(role)
    shapes = {name: Outline(slot.shape, host_dtype(slot.dtype)) for name, slot in slots.items()}
    outlines = {**Tensors.of(unread).outlines, **shapes}

    def each(names: Sequence[str]) -> Iterator[Array]:
        from_crew = (value for _, value in crew.each(role, [n for n in names if n in slots]))
        return (next(from_crew) if name in slots else unread[name] for name in names)

    return joined(Tensors(outlines, each), parts)


def joined(tensors: Tensors, parts: SplitParameters) -> Tensors:
    """Return tensors with the graphs' names by the model's names."""

    def each(names: Sequence[str]) -> Iterator[Array]:
        values = tensors.each([part for name in names for part in parts.names(name)])
        for name in names:
            pieces = list(islice(values, len(parts.names(name))))
            yield pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return Tensors(_joined(tensors.outlines, parts), each)


def _joined(outlines: Mapping[str, Outline], parts: SplitParameters) -> dict[str, Outline]:
    """Return the outlines by the model's names."""
    joined = {}
    for whole in dict.fromkeys(map(parts.whole, outlines)):
        pieces = [outlines[name] for name in parts.names(whole)]
        shape = pieces[0].shape
        if len(pieces) > 1:
            shape = (sum(piece.shape[0] for piece in pieces), *shape[1:])
        joined[whole] = Outline(shape, pieces[0].dtype)
    return joined


def split(tensors: Tensors, parts: SplitParameters) -> Tensors:
    """Return tensors with the model's names by the graphs' names. A tensor that is read for one of
    its parts is kept until the other part is read."""
    kept: dict[str, Array] = {}

    def each(names: Sequence[str]) -> Iterator[Array]:
        for name in names:
            if name not in kept:
                whole = parts.whole(name)
                kept.update(parts.split({whole: tensors[whole]}))
            yield kept.pop(name)

    empty = {
        n: np.broadcast_to(np.zeros((), o.dtype), o.shape) for n, o in tensors.outlines.items()
    }
    return Tensors(Tensors.of(parts.split(empty)).outlines, each)
