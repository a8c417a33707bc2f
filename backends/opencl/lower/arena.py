"""Places a graph's intermediates in one arena; tensors with disjoint lives share memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hetpipe.sdk.info import DTYPE_NBYTES

from .expr import Value
from .launch import Launch

Span = tuple[int, int]
"""Begin and end in bytes."""


@dataclass(frozen=True)
class Life:
    """The first and the last launch that use a piece of memory, and the size of the piece."""

    first: int
    last: int
    nbytes: int
    itemsize: int


def nbytes(value: Value) -> int:
    return math.prod(value.shape) * DTYPE_NBYTES[value.dtype]


def aligned(nbytes: int, alignment: int) -> int:
    """Return the bytes that a tensor takes in an arena."""
    return max(1, -(-nbytes // alignment)) * alignment


def lives(launches: Sequence[Launch]) -> dict[int, Life]:
    """Return the life of each tensor's memory, by id, in order of first use.

    A dataflow's launches (see `Launch.beside`) run together, so the last one counts for all.
    """
    by_id: dict[int, Life] = {}
    for number, launch in enumerate(launches):
        at = next(i for i, each in enumerate(launches[number:], number) if not each.beside)
        for arg in launch.args:
            if isinstance(arg, Value):
                first = by_id[arg.id].first if arg.id in by_id else at
                by_id[arg.id] = Life(first, at, nbytes(arg), DTYPE_NBYTES[arg.dtype])
    return by_id


def inherits(
    old_id: int, new_id: int, life: Mapping[int, Life], launches: Sequence[Launch]
) -> bool:
    """Return whether `new` may take the memory of `old`; both must have the same size.

    `old` must be dead before `new` is written, or one launch must read each element of `old` just
    before it writes the same element of `new`.
    """
    old, new = life[old_id], life[new_id]
    if old.nbytes != new.nbytes:
        return False
    if old.last < new.first:
        return True
    launch = launches[new.first]
    in_place = old_id in launch.inplace and new_id not in launch.apart
    return old.last == new.first and in_place and old.itemsize == new.itemsize


def place(
    life: Mapping[int, Life],
    launches: Sequence[Launch],
    alignment: int,
    fixed: Mapping[int, Span] = MappingProxyType({}),
    most: int | None = None,
) -> tuple[dict[int, int], int]:
    """Return the offset of each tensor by id, and the size of the arena, all in bytes.

    Tensors are placed in order of first use, each in memory that it inherits, or else in the first
    gap that fits. Tensors in `fixed` keep their place. The arena has at most `most` bytes: a tensor
    that does not fit gets no offset, and a tensor that outlives the launches is placed as near to
    the end as possible.
    """
    offsets: dict[int, int] = {}
    live: dict[int, Span] = {}
    total = 0
    births = defaultdict(list)
    for key, each in life.items():
        if key not in fixed:
            births[each.first].append(key)
    for at, born in sorted(births.items()):
        live = {key: span for key, span in live.items() if life[key].last >= at}
        fixed = {key: span for key, span in fixed.items() if life[key].last >= at}
        ending = [key for key in (*live, *fixed) if life[key].last == at]
        for key in born:
            soon = {k: s for k, s in fixed.items() if life[k].first <= life[key].last}
            heir = next((o for o in ending if inherits(o, key, life, launches)), None)
            span = None if heir is None else live.get(heir) or fixed[heir]
            if span is not None and not _meets(span, (s for k, s in soon.items() if k != heir)):
                ending = [other for other in ending if other != heir]
                live = {k: s for k, s in live.items() if k != heir}
                fixed = {k: s for k, s in fixed.items() if k != heir}
            else:
                end = None if most is None else most // alignment * alignment
                upwards = end if life[key].last >= len(launches) else None
                taken = (*live.values(), *soon.values())
                span = _free(taken, aligned(life[key].nbytes, alignment), upwards)
                if span[0] < 0 or (most is not None and span[1] > most):
                    continue
            live[key] = span
            offsets[key] = span[0]
            total = max(total, span[1])
    return offsets, total


def _meets(span: Span, others: Iterable[Span]) -> bool:
    return any(span[0] < high and low < span[1] for low, high in others)


def _free(taken: Iterable[Span], size: int, end: int | None) -> Span:
    """Return the first gap of `size` bytes, or with `end` the last gap before it."""
    if end is not None:
        low, high = _free([(end - high, end - low) for low, high in taken], size, None)
        return end - high, end - low
    begin = 0
    for low, high in sorted(taken):
        if low - begin >= size:
            break
        begin = max(begin, high)
    return begin, begin + size
