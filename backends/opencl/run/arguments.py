"""Sets the memory arguments of an executable's kernels, and only the arguments that change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from .memory import Memory, Piece
from .placement import Plan, Where

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
