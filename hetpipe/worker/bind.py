"""Gives every slot of a stage's programs a place, once, when the stage is loaded.

A place is an entry of one of three tables: the parameters (of the version that a pass uses), the
store (lasting values), and the frame (values of one micro-batch). Station 6 of
docs/life-of-a-micro-batch.md fills a frame. Stations 7 and 10 run on all three tables; station 14
has no frame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

from hetpipe.capture.passes.late_gradients import drop_zeros, first_gradients, late_names
from hetpipe.capture.program import (
    BUFFER,
    CONSTANT,
    GRAD,
    INPUT,
    PARAM,
    SAVED,
    SCALAR,
    STATE,
    TANGENT,
    PassPrograms,
    Program,
    Slot,
    StageGraphs,
)  # fmt: skip
from hetpipe.sdk.graph import graph_outputs
from hetpipe.wire.wire import IN_EVAL, Content, forwards_of

Key = tuple[str, str]
"""Role and name of a slot."""


class Table(IntEnum):
    """The table that contains a value."""

    PARAMS = 0
    STORE = 1
    FRAME = 2


TABLE_OF = {
    PARAM: Table.PARAMS,
    **dict.fromkeys((BUFFER, CONSTANT, GRAD, STATE, SCALAR), Table.STORE),
}
"""The table of each role; all other roles belong to the frame."""


class Place(NamedTuple):
    """An entry of a table."""

    table: Table
    entry: int


@dataclass(frozen=True)
class Binding:
    """A program, and the places of its inputs and outputs."""

    program: Program
    sources: tuple[Place, ...]
    targets: tuple[Place, ...]
    donate: frozenset[int]
    """Inputs that every run may overwrite."""
    parameters: frozenset[int]
    """Inputs that are parameters."""

    def donate_also(self, entries: Collection[int]) -> Binding:
        """Return this binding with these entries of the frame donated as well."""
        places = enumerate(self.sources)
        more = {i for i, (table, at) in places if table is Table.FRAME and at in entries}
        return replace(self, donate=self.donate | more)

    @property
    def feeds(self) -> tuple[tuple[str, int], ...]:
        """Name of each leaf of the batch that the program reads, and its index in the frame."""
        pairs = zip(self.program.inputs, self.sources, strict=True)
        return tuple((slot.name, place.entry) for slot, place in pairs if slot.role == INPUT)


@dataclass(frozen=True)
class PassBindings:
    """The passes for one number of samples. Entries are indices in the frame."""

    forward: Binding
    backwards: tuple[Binding, ...]
    """The whole backward, or its two halves; empty if there is no gradient."""
    firsts: tuple[Binding, ...]
    """The same backwards, but they create late gradients; empty if gradients are not late."""
    feeds: tuple[tuple[str, int], ...]
    """Name of each leaf of the batch that a pass reads, and its index."""
    kept: frozenset[int]
    """Entries that a backward reads."""
    awaited: tuple[frozenset[int], ...]
    """After each pass, the entries that a later backward reads."""
    dead: tuple[tuple[int, ...], ...]
    """After each pass, the entries that no later pass reads."""

    def backward(self, part: int, first: bool) -> Binding:
        """Return the backward, or half `part` of it. With `first`, it creates late gradients."""
        return (self.firsts if first else self.backwards)[part]


class StageBinding:
    """Slots and places of all programs of a stage."""

    def __init__(self, graphs: StageGraphs, late: bool = False) -> None:
        """With `late`, a backward creates gradients and the update consumes them."""
        self.slots: dict[Key, Slot] = {
            slot.key: slot
            for program in graphs.programs.values()
            for slot in (*program.inputs, *program.outputs)
        }
        self.sizes = dict.fromkeys(Table, 0)  # number of entries of each table
        self.places: dict[Key, Place] = {}
        for key, slot in self.slots.items():
            table = TABLE_OF.get(slot.role, Table.FRAME)
            self.places[key] = Place(table, self.sizes[table])
            self.sizes[table] += 1
        # With `late`, by samples: the backwards, or their halves, that create gradients.
        self._firsts: dict[int, list[Program]] = {}
        for samples, passes in graphs.passes.items() if late else ():
            self._firsts[samples] = list(map(first_gradients, passes.backwards))
        late_ones = late_names(chain.from_iterable(self._firsts.values()))
        self.late = frozenset(self.places[GRAD, name].entry for name in late_ones)
        """Entries of the store that are late gradients."""
        self.late_nbytes = sum(self.slots[GRAD, name].nbytes for name in late_ones)
        self.passes = {samples: self._passes(p) for samples, p in graphs.passes.items()}
        self.forwards = {
            content: {samples: self.bind(p) for samples, p in forwards_of(graphs, content).items()}
            for content in IN_EVAL
        }
        """Forwards in eval mode, by content of their messages and by number of samples."""
        update = graphs.update
        if update is not None and late_ones:
            update = drop_zeros(update, late_ones)
        self.update = None if update is None else self.bind(update, (GRAD, STATE))
        trained = () if update is None else update.outputs
        self.trained = frozenset(slot.key for slot in trained if slot.role == PARAM)
        """The parameters that an update writes."""
        self.predict = None if graphs.predict is None else self.bind(graphs.predict)
        self.norm = None if graphs.norm is None else self.bind(graphs.norm)

    def index_of(self, role: str) -> int | None:
        """Return the index of a role's only slot; None if there is no such slot."""
        return next((self.places[key].entry for key in self.places if key[0] == role), None)

    def entries(self, role: str, names: Iterable[str]) -> list[int]:
        """Return the indices of slots of a role in their table."""
        return [self.places[role, name].entry for name in names]

    def awaited(self, samples: int, part: int | Content) -> frozenset[int]:
        """Return the entries that a later backward reads after this pass; none in eval mode."""
        if isinstance(part, Content):
            return frozenset()
        return self.passes[samples].awaited[part]

    def names(self, role: str) -> list[str]:
        """Return the names of the slots of a role."""
        return [slot.name for slot in self.slots.values() if slot.role == role]

    def bind(self, program: Program, donated: Iterable[str] = ()) -> Binding:
        """Return the places of a program's slots; inputs of `donated` roles may be overwritten."""
        roles = frozenset(donated)
        return Binding(
            program,
            tuple(self.places[slot.key] for slot in program.inputs),
            tuple(self.places[slot.key] for slot in program.outputs),
            frozenset(i for i, slot in enumerate(program.inputs) if slot.role in roles),
            frozenset(i for i, slot in enumerate(program.inputs) if slot.role == PARAM),
        )

    def used(self, *, predicts: bool) -> list[Binding]:
        """Return the bindings that every training uses.

        With late gradients, a backward that adds to gradients is left out: it is compiled if a
        second backward comes before the update.
        """
        passes = [
            bound for p in self.passes.values() for bound in (p.forward, *(p.firsts or p.backwards))
        ]
        predict = self.predict if predicts else None
        forwards = chain(*(by_samples.values() for by_samples in self.forwards.values()))
        more = (self.update, predict, self.norm, *forwards)
        return [bound for bound in (*passes, *more) if bound is not None]

    def _passes(self, passes: PassPrograms) -> PassBindings:
        forward = self.bind(passes.forward)
        backwards = [self.bind(program, (GRAD,)) for program in passes.backwards]
        reads = [_in_frame(part.sources) for part in backwards]
        firsts = [self.bind(program, (GRAD,)) for program in self._firsts.get(passes.samples, ())]
        saved: set[int] = set()
        for part, before in enumerate((forward, *backwards)[:-1]):
            saved |= _saved_once(before)
            lasts = saved.difference(*reads[part + 1 :])
            backwards[part] = backwards[part].donate_also(lasts)
            if firsts:
                firsts[part] = firsts[part].donate_also(lasts)
        kept = frozenset().union(*reads)
        later = [frozenset().union(*reads[part + 1 :]) for part in range(len(reads))]
        read, written = _in_frame(forward.sources), _in_frame(forward.targets)
        sent_back = _in_frame(place for part in backwards for place in part.targets)
        tangents = _in_frame(place for key, place in self.places.items() if key[0] == TANGENT)
        unsent = sent_back & tangents  # gradients that may not have left yet
        after_backward = (read | written | kept | sent_back) - unsent
        feeds = dict(chain(*(part.feeds for part in (forward, *backwards))))
        return PassBindings(
            forward,
            tuple(backwards),
            tuple(firsts),
            tuple(feeds.items()),
            kept,
            (kept, *later),
            (tuple(read - kept - written), *(tuple(after_backward - needed) for needed in later)),
        )


def _saved_once(binding: Binding) -> set[int]:
    """Return the entries of saved tensors that are exactly one output of the program."""
    nodes = graph_outputs(binding.program.graph)
    counts = Counter(nodes)
    pairs = zip(binding.program.outputs, binding.targets, nodes, strict=True)
    return {place.entry for slot, place, node in pairs if slot.role == SAVED and counts[node] == 1}


def _in_frame(places: Iterable[Place]) -> frozenset[int]:
    return frozenset(place.entry for place in places if place.table is Table.FRAME)
