"""The arguments of an executable's kernels that are memory, set only where they change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from .memory import Memory, Piece
from .placement import Plan, Where

FEW = 4
"""Changes of memory in a row after which intermediates stay in the arena: to set the arguments of
hundreds of small kernels takes as long as to run them."""


class Arguments:
    """Which arguments stand for which tensor, and the memory that they are set to."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        # Setting an argument retains nothing, so references to the memories are kept here.
        self._set: dict[int, Any] = {}
        self._settled: tuple[Plan, dict[Where, Piece | None]] | None = None
        self._changes = 0

    @property
    def moves(self) -> bool:
        """Whether other pieces of memory come again and again, as with micro-batches in flight."""
        return self._changes > FEW

    def add(self, key: int, kernel: Any, at: int) -> None:
        """Argument `at` of a kernel is tensor `key`."""
        self._of[key].append((kernel, at))

    def unset(self, keys: Iterable[int]) -> list[int]:
        """Those of these tensors that are arguments and have no memory yet."""
        return [key for key in keys if key in self._of and key not in self._set]

    def set(self, key: int, memory: Any) -> None:
        """Have the arguments for tensor `key` be a `cl.Buffer`."""
        if self._set.get(key) is not memory:
            for kernel, at in self._of[key]:
                kernel.set_arg(at, memory)
            self._set[key] = memory

    def settle(
        self, plan: Plan, donated: Memory | None, new: Memory | None, arena: Piece | None
    ) -> None:
        """Set the arguments of all that the plan places: most runs have the last one's pieces."""
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
