"""Knows the stages that have each parameter, buffer, gradient and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from hetpipe.capture.program import BUFFER, GRAD, PARAM, STATE, Slot, StageGraphs
from hetpipe.checkpoint.tensors import Outline
from hetpipe.errors import HetpipeError
from hetpipe.wire.messages import Array
from hetpipe.wire.wire import host_dtype
from hetpipe.worker.bind import Key

READABLE = (PARAM, BUFFER, STATE, GRAD)

PIECE_NBYTES = 8 << 20
"""The most bytes of values in one message, unless a single value has more."""


class Places:
    """The stages that have each value. A value of several stages belongs to the first of them."""

    def __init__(self, stages: Sequence[StageGraphs]) -> None:
        self.slots: list[dict[Key, Slot]] = [
            {slot.key: slot for p in stage.programs.values() for slot in (*p.inputs, *p.outputs)}
            for stage in stages
        ]
        """The slots of each stage."""
        self.tied = {name: owner for stage in stages for name, owner, _ in stage.tied}
        """The stage that owns each trained parameter of several stages."""

    def owned(self, role: str) -> dict[str, Slot]:
        """Return the slots of a role, by name, in the order of the stages that own them."""
        return {name: self.slots[n][role, name] for name, n in self.owners(role).items()}

    def reads(self, role: str, names: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
        """Yield the stages to read from, one after another, and the names that each stage owns."""
        owner = self.owners(role, names := list(names))
        return _pieces((owner[name], self.slots[owner[name]][role, name]) for name in names)

    def writes(
        self, role: str, values: Mapping[str, Array]
    ) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield the stages to write to, one after another, and the values that each stage has.

        A tied gradient is a sum over stages: the owner gets the value, all other stages get zero.
        """
        owner, by_stage = self.owners(role, values), self._by_stage(role)
        slots = [(n, slot) for n, own in enumerate(by_stage) for slot in own if slot.name in values]
        for stage, names in _pieces(slots):
            share = {name: np.asarray(values[name], order="C") for name in names}
            for name, value in share.items():
                check_fit(self.slots[stage][role, name], value)
            if role == GRAD:
                elsewhere = [name for name in names if owner[name] != stage]
                share.update({name: np.zeros_like(share[name]) for name in elsewhere})
            yield stage, share

    def borrows(self, values: Mapping[str, Array]) -> Iterator[tuple[int, dict[str, Array]]]:
        """Yield the stages that have tied parameters of other stages, and these among `values`."""
        for stage, share in self.writes(PARAM, values):
            yield stage, {name: v for name, v in share.items() if self.tied[name] != stage}

    def swaps(self, state: str) -> dict[int, tuple[tuple[Key, Key], ...]]:
        """Return, by stage, the slots of the state `state`, each with its parameter's slot."""
        begin = f"{state}/"
        return {
            stage: tuple(
                (slot.key, (PARAM, slot.name.removeprefix(begin)))
                for slot in slots
                if slot.name.startswith(begin)
            )
            for stage, slots in enumerate(self._by_stage(STATE))
        }

    def kept(self, stage: int) -> list[Key]:
        """Return the role and the name of each value of a stage that can be read."""
        return [key for key in self.slots[stage] if key[0] in READABLE]

    def owners(self, role: str, names: Iterable[str] = ()) -> dict[str, int]:
        """Return the stage that owns each value of a role. Raises `HetpipeError` if one of `names`
        is unknown."""
        owner: dict[str, int] = {}
        for stage, slots in enumerate(self._by_stage(role)):
            for slot in slots:
                owner.setdefault(slot.name, stage)
        for name in names:
            if name not in owner:
                raise HetpipeError(f"no {role} {name!r}; there are {len(owner)}: {some(owner)}")
        return owner

    def _by_stage(self, role: str) -> list[list[Slot]]:
        if role not in READABLE:
            raise HetpipeError(f"role {role!r} is not kept; choose from {', '.join(READABLE)}")
        return [[slot for slot in own.values() if slot.role == role] for own in self.slots]


def _pieces(slots: Iterable[tuple[int, Slot]]) -> Iterator[tuple[int, list[str]]]:
    """Yield the stages and the names of their slots in pieces of at most `PIECE_NBYTES`."""
    for stage, own in groupby(slots, lambda item: item[0]):
        names: list[str] = []
        sum_nbytes = 0
        for _, slot in own:
            if names and sum_nbytes + slot.nbytes > PIECE_NBYTES:
                yield stage, names
                names, sum_nbytes = [], 0
            names.append(slot.name)
            sum_nbytes += slot.nbytes
        yield stage, names


def check_fit(slot: Slot, value: Array | Outline) -> None:
    """Raise `HetpipeError` for a value of another shape or dtype than its slot."""
    if value.shape != slot.shape or value.dtype != host_dtype(slot.dtype):
        raise HetpipeError(
            f"{slot.role} {slot.name!r} is {slot.dtype}{list(slot.shape)} in the graphs, "
            f"but {value.dtype}{list(value.shape)} was given"
        )


def some(names: Mapping[str, Any]) -> str:
    """Return the first few names as text."""
    listed = list(names)
    return ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else "") or "none"
