"""Placement of a run's tensors in memory.

Results that the caller keeps together, such as all tensors that a forward saves, share a new piece
of memory. A later run gets these results as donated inputs. After the last launch that reads a
donated input, the run reuses the input's memory for intermediates and for results that are kept
together. Intermediates that find no room in either piece are placed in the queue's arena.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from hetpipe.sdk.info import DTYPE_NBYTES

from ..lower.arena import Life, Span, aligned, lives, nbytes, place
from ..lower.launch import Launch
from ..lower.lowering import Lowered
from .memory import Memory, OpenCLBuffer, Part, Piece

LEAST_NBYTES = 1 << 18
"""A run whose tensors have fewer bytes than this packs none into a donated piece, because changing
a run's memory means setting kernel arguments again."""


class Where(IntEnum):
    """The memory that holds a tensor."""

    DONATED = 0
    NEW = 1
    ARENA = 2


class Spot(NamedTuple):
    """Bytes in one of the memories of a run."""

    where: Where
    begin: int
    nbytes: int


class Given(NamedTuple):
    """Donated inputs that are parts of larger pieces of memory."""

    inputs: frozenset[int]
    nbytes: int
    """Size of the piece that holds most bytes of these inputs."""
    begins: tuple[Span, ...]
    """(index of the input, its first byte) for each input in that piece."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The memory of all tensors of a run."""

    heirs: tuple[int | None, ...]
    """For each output, the donated input whose memory it takes."""
    spots: Mapping[int, Spot]
    """Spots of intermediates and outputs, by id. An output without spot and heir gets new memory
    for itself."""
    new_nbytes: int
    arena_nbytes: int


NOTHING = Given(frozenset(), 0, ())


def given(buffers: Sequence[OpenCLBuffer], donate: frozenset[int]) -> tuple[Memory | None, Given]:
    """Return the piece of memory with most of the donated bytes, and the inputs in such pieces."""
    parts = {i: part for i in sorted(donate) if isinstance(part := buffers[i].memory, Part)}
    if not parts:
        return None, NOTHING
    sizes: Counter[int] = Counter()
    for part in parts.values():
        sizes[id(part.whole)] += part.nbytes
    ((largest, _),) = sizes.most_common(1)
    inside = {i: part for i, part in parts.items() if id(part.whole) == largest}
    whole = next(iter(inside.values())).whole
    begins = tuple((i, part.begin) for i, part in inside.items())
    return whole, Given(frozenset(parts), whole.nbytes, begins)


def plan(
    lowered: Lowered,
    donate: frozenset[int],
    given: Given,
    apart: frozenset[int],
    alignment: int,
    moves: bool = False,
) -> Plan:
    """Plan runs with these donated inputs. Intermediates in `apart` get no spot.

    With `moves`, each run gets other pieces of memory, so intermediates stay in the arena.
    """
    life = lives(lowered.launches)
    # A result in a part would keep the whole piece alive, so only results kept together use parts.
    heirs = heirs_of(lowered, donate - given.inputs)
    kept = _kept(lowered, heirs, life)
    inside = {key: span for key, span in life.items() if key not in lowered.crossing | apart}
    if sum(span.nbytes for span in (*inside.values(), *kept.values())) < LEAST_NBYTES:
        given = NOTHING
    taken = _taken(lowered, life, given, alignment)
    plans = []
    # Put kept results into the donated piece first, or all tensors at once: neither is always best.
    fitting = {} if moves else inside
    for first in ({**fitting, **kept}, kept):
        packing = _Packing(lowered.launches, alignment)
        packing.pack(Where.DONATED, first, taken, given.nbytes)
        packing.pack(Where.DONATED, fitting, taken, given.nbytes)
        new_nbytes = packing.pack(Where.NEW, kept)
        packing.pack(Where.NEW, fitting, {}, new_nbytes)
        arena_nbytes = packing.pack(Where.ARENA, inside)
        plans.append(Plan(heirs, packing.spots, new_nbytes, arena_nbytes))
    return min(plans, key=lambda plan: plan.new_nbytes + plan.arena_nbytes)


class _Packing:
    """Assigns spots to tensors, one memory after the other."""

    def __init__(self, launches: Sequence[Launch], alignment: int) -> None:
        self._launches = launches
        self._alignment = alignment
        self._life: dict[int, Life] = {}
        self.spots: dict[int, Spot] = {}

    def pack(
        self,
        where: Where,
        life: Mapping[int, Life],
        taken: Mapping[int, tuple[Life, Span]] = MappingProxyType({}),
        most: int | None = None,
    ) -> int:
        """Place in one memory the tensors that have no spot yet, if they fit into its `most` bytes.

        The tensors avoid the spots already there and the spans in `taken`. Returns the bytes used.
        """
        rest = {key: span for key, span in life.items() if key not in self.spots}
        fixed = {
            key: (spot.begin, spot.begin + spot.nbytes)
            for key, spot in self.spots.items()
            if spot.where is where
        }
        fixed.update((key, span) for key, (_, span) in taken.items())
        rest.update((key, span) for key, (span, _) in taken.items())
        rest.update((key, self._life[key]) for key in fixed.keys() - taken.keys())
        offsets, total = place(rest, self._launches, self._alignment, fixed, most)
        self._life.update(life)
        for key, begin in offsets.items():
            size = aligned(life[key].nbytes, self._alignment)
            self.spots[key] = Spot(where, begin, size)
        return total


def heirs_of(lowered: Lowered, donate: frozenset[int]) -> tuple[int | None, ...]:
    """Return for each output the donated input whose memory it takes, or None."""
    free = set(donate)
    heirs = []
    for output in lowered.outputs:
        heir = next((index for index in output.heirs if index in free), None)
        free.discard(-1 if heir is None else heir)
        heirs.append(heir)
    return tuple(heirs)


def _kept(
    lowered: Lowered, heirs: Sequence[int | None], life: Mapping[int, Life]
) -> dict[int, Life]:
    """Return the results that are kept together, by id; they live until the end of the run."""
    end, kept = len(lowered.launches), {}
    for index in sorted(lowered.together):
        value = lowered.outputs[index].value
        if value is not None and heirs[index] is None:
            first = life[value.id].first if value.id in life else 0
            kept[value.id] = Life(first, end, nbytes(value), DTYPE_NBYTES[value.dtype])
    return kept


def _taken(
    lowered: Lowered, life: Mapping[int, Life], given: Given, alignment: int
) -> dict[int, tuple[Life, Span]]:
    """Return the donated inputs of the piece, by id, each with its life until its last use.

    Further entries, with negative ids, keep the gaps between the inputs occupied for the whole run.
    """
    end = len(lowered.launches)
    returned = {output.source for output in lowered.outputs}
    taken, reached = {}, 0
    for index, begin in sorted(given.begins, key=lambda pair: pair[1]):
        value = lowered.inputs[index]
        last = life[value.id].last if value.id in life else -1
        last = end if index in returned else last
        span = (begin, begin + aligned(nbytes(value), alignment))
        taken[-index - 1] = _until(end, (reached, begin))
        itemsize = DTYPE_NBYTES[value.dtype]
        taken[value.id] = Life(-1, last, nbytes(value), itemsize), span
        reached = span[1]
    taken[-len(lowered.inputs) - 1] = _until(end, (reached, given.nbytes))
    return {key: each for key, each in taken.items() if each[1][0] < each[1][1]}


def _until(end: int, span: Span) -> tuple[Life, Span]:
    return Life(-1, end, 0, 1), span


FEW = 4
"""After more than FEW changes of memory in a row, intermediates stay in the arena: setting the
arguments of hundreds of small kernels takes as long as running them."""


class Arguments:
    """The kernel arguments of each tensor, and the memory to which they are set."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        # Setting an argument retains nothing, so references to the memories are kept here.
        self._set: dict[int, Any] = {}
        self._settled: tuple[Plan, dict[Where, Piece | None]] | None = None
        self._changes = 0

    @property
    def moves(self) -> bool:
        """Whether the memory keeps changing, as with several micro-batches in flight."""
        return self._changes > FEW

    def add(self, key: int, kernel: Any, at: int) -> None:
        """Record that argument `at` of `kernel` is tensor `key`."""
        self._of[key].append((kernel, at))

    def unset(self, keys: Iterable[int]) -> list[int]:
        """Return the tensors in `keys` that are arguments and have no memory yet."""
        return [key for key in keys if key in self._of and key not in self._set]

    def set(self, key: int, memory: Any) -> None:
        """Set all arguments for tensor `key` to `memory`, a `cl.Buffer`."""
        if self._set.get(key) is not memory:
            for kernel, at in self._of[key]:
                kernel.set_arg(at, memory)
            self._set[key] = memory

    def settle(
        self, plan: Plan, donated: Memory | None, new: Memory | None, arena: Piece | None
    ) -> None:
        """Set the arguments of all tensors that `plan` places.

        Most runs use the same pieces of memory as the previous run: nothing is set then.
        """
        pieces = {
            Where.DONATED: None if donated is None else donated.piece,
            Where.NEW: None if new is None else new.piece,
            Where.ARENA: arena,
        }
        if self._settled == (settled := (plan, pieces)):
            self._changes *= self.moves
            return
        self._settled = settled
        self._changes += 1
        for key, spot in plan.spots.items():
            if (piece := pieces[spot.where]) is not None:
                self.set(key, piece.part(spot.begin, spot.nbytes))
