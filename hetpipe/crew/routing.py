"""Finds the wires that stages and their replicas need."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise, permutations, product

from hetpipe.capture.program import CUT, GRAD, PARAM, TANGENT, PassPrograms, Slot, StageGraphs
from hetpipe.errors import HetpipeError
from hetpipe.wire.row_messages import find_axes, kind_of, rows_of
from hetpipe.wire.shares import Replica, Shares, overlap
from hetpipe.wire.wire import (
    GRADIENTS,
    IN_EVAL,
    Axes,
    Content,
    Kind,
    Layout,
    Wire,
    forwards_of,
    host_dtype,
)
from hetpipe.worker.divided import exchanges

Edge = tuple[Replica, Replica]
"""Source and target."""


def wires(
    stages: Sequence[Sequence[StageGraphs]], shares: Shares, sizes: Collection[int]
) -> list[Wire]:
    """Return the wires for whole micro-batches of these sizes.

    `stages[n]` are the replicas of stage n. A kind of message that would carry no tensor has no
    layout. Raises `HetpipeError` for stages that do not fit together.
    """
    layouts: dict[Edge, dict[Kind, Layout]] = {}
    axes: dict[Edge, Axes] = {}

    def add(edge: Edge, kind: Kind, layout: Layout) -> None:
        if layout:
            layouts.setdefault(edge, {})[kind] = layout

    for n, replicas in enumerate(stages):
        for source, target in permutations(shares.replicas(n), 2):
            add((source, target), GRADIENTS, gradients(replicas[0]))
        sums = exchanges(replicas) if len(replicas) > 1 else {}
        for source, target in permutations(shares.replicas(n), 2):
            for kind, layout in sums.items():
                add((source, target), kind, layout)
    for n, (lefts, rights) in enumerate(pairwise(stages)):
        crossing = _Crossing(n, lefts, rights, shares, sizes)
        for here, there in product(shares.replicas(n), shares.replicas(n + 1)):
            if shares.meet(here, there):
                axes[here, there] = axes[there, here] = crossing.axes
                for edge, kind, layout in crossing.between(here, there):
                    add(edge, kind, layout)
    for one, other, content, layout in _tied_messages([replicas[0] for replicas in stages]):
        for target in shares.replicas(other):
            add((Replica(one, 0), target), Kind(content, 0), layout)
    return [Wire(*edge, kinds, axes.get(edge, {})) for edge, kinds in layouts.items()]


def gradients(stage: StageGraphs) -> Layout:
    """Return the gradients that the replicas of a stage sum."""
    update = stage.update
    return () if update is None else tuple(s for s in update.inputs if s.role == GRAD)


class _Crossing:
    """The messages between two neighbouring stages."""

    def __init__(
        self,
        cut: int,
        lefts: Sequence[StageGraphs],
        rights: Sequence[StageGraphs],
        shares: Shares,
        sizes: Collection[int],
    ) -> None:
        self._stages = (cut, cut + 1)
        self._sides = {cut: lefts, cut + 1: rights}
        self._shares, self._sizes = shares, sizes
        self.axes: Axes = {}
        if any(
            shares.rows(here, size) != shares.rows(there, size)
            for here, there in product(*map(shares.replicas, self._stages))
            for size in sizes
            if overlap(shares.rows(here, size), shares.rows(there, size)) != (0, 0)
        ):
            self.axes = find_axes(self._shapes())

    def between(self, here: Replica, there: Replica) -> Iterator[tuple[Edge, Kind, Layout]]:
        """Yield the edge, kind and layout of each message that two replicas exchange."""
        left, right = (self._sides[n][replica] for n, replica in (here, there))
        for size in self._sizes:
            rows = self._shares.rows(here, size), self._shares.rows(there, size)
            if overlap(*rows) == (0, 0):
                continue
            counts = [self._shares.count(end, size) for end in (here, there)]
            near, far = left.passes.get(counts[0]), right.passes.get(counts[1])
            if near is not None and far is not None:
                kind = kind_of(Content.FORWARD, size, *rows)
                sent, read = near.forward.outputs, _inputs(far)
                yield (here, there), kind, self._layout(kind, sent, read, CUT, self._stages)
                if near.backward is not None and far.backward is not None:
                    back = self._stages[1], self._stages[0]
                    sent, read = far.backward.outputs, near.backward.inputs
                    kind = kind_of(Content.BACKWARD, size, *rows)
                    yield (there, here), kind, self._layout(kind, sent, read, TANGENT, back)
            for content in IN_EVAL:
                sides = forwards_of(left, content), forwards_of(right, content)
                sender, receiver = sides[0].get(counts[0]), sides[1].get(counts[1])
                if sender is not None and receiver is not None:
                    kind = kind_of(content, size, *rows)
                    sent, read = sender.outputs, receiver.inputs
                    yield (here, there), kind, self._layout(kind, sent, read, CUT, self._stages)

    def _layout(
        self,
        kind: Kind,
        sent: Sequence[Slot],
        read: Sequence[Slot],
        role: str,
        ends: tuple[int, int],
    ) -> Layout:
        if not kind.content.has_some_rows:
            return _common(sent, read, role, ends)
        names = {slot.name for slot in read if slot.role == role}
        whole = tuple(slot for slot in sent if slot.role == role and slot.name in names)
        rows = int(kind.number)
        left, right = (
            rows_of(tuple(_matching(side, whole)), self.axes, rows) for side in (sent, read)
        )
        return _common(left, right, role, ends)

    def _shapes(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """Yield name, rows and shape of each tensor that crosses, for every number of rows."""
        left, right = (self._sides[n][0] for n in self._stages)
        sent = {s.name for _, p in left.forwards for s in p.outputs if s.role == CUT}
        read = {s.name for _, p in right.forwards for s in p.inputs if s.role == CUT}
        for stage in (*self._sides[self._stages[0]], *self._sides[self._stages[1]]):
            for rows, forward in stage.forwards:
                for slot in (*forward.outputs, *forward.inputs):
                    if slot.role == CUT and slot.name in sent & read:
                        yield slot.name, rows, slot.shape


def _matching(slots: Sequence[Slot], others: Sequence[Slot]) -> Iterator[Slot]:
    """Yield the slots whose key is also in `others`, each key once."""
    keys = {slot.key for slot in others}
    yield from {slot.key: slot for slot in slots if slot.key in keys}.values()


def _inputs(passes: PassPrograms) -> tuple[Slot, ...]:
    backward = passes.backward.inputs if passes.backward is not None else ()
    return (*passes.forward.inputs, *backward)


def _common(sent: Sequence[Slot], read: Sequence[Slot], role: str, ends: tuple[int, int]) -> Layout:
    """Return the slots of a role that stage `ends[0]` sends and stage `ends[1]` reads. Raises
    `HetpipeError` if both have a slot of one name and the slots differ."""
    by_name = {slot.name: slot for slot in sent if slot.role == role}
    layout: dict[str, Slot] = {}
    for slot in read:
        if slot.role != role or slot.name not in by_name:
            continue
        if by_name[slot.name] != slot:
            raise HetpipeError(
                f"stage {ends[0]} sends {slot.name} as {_text(by_name[slot.name])}, but stage "
                f"{ends[1]} reads it as {_text(slot)}: these stages come from different captures; "
                "take all stages from one capture"
            )
        host_dtype(slot.dtype)
        layout[slot.name] = slot
    return tuple(layout.values())


def _text(slot: Slot) -> str:
    return f"{slot.dtype}{list(slot.shape)}"


def _tied_messages(stages: Sequence[StageGraphs]) -> list[tuple[int, int, Content, Layout]]:
    grads: dict[tuple[int, int], list[Slot]] = {}
    for name, owner, others in dict.fromkeys(entry for stage in stages for entry in stage.tied):
        update = stages[owner].update
        if update is None:
            continue
        slot = next((s for s in update.inputs if s.key == (GRAD, name)), None)
        if slot is None:
            continue  # frozen: never updated, so never exchanged
        for other in others:
            grads.setdefault((owner, other), []).append(slot)
    messages: list[tuple[int, int, Content, Layout]] = []
    for (owner, other), slots in grads.items():
        params = tuple(Slot(PARAM, slot.name, slot.shape, slot.dtype) for slot in slots)
        messages.append((other, owner, Content.TIED_GRAD, tuple(slots)))
        messages.append((owner, other, Content.TIED_PARAM, params))
    return messages
