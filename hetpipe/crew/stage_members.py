"""Assigns members to stages and rows, and plans moves: members get other stages of the same model,
and keep the values that they still need (station 2 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hetpipe.capture.program import GRAD, StageGraphs
from hetpipe.crew.assembly import Assembly
from hetpipe.errors import HetpipeError
from hetpipe.wire.shares import Replica, Shares


class StageMembers:
    """The members of each stage: `members[n]` has one member for each replica of stage n.

    A schedule's rows are the members in the order of their first stage; the replicas of a stage
    share one row, unless they take turns. Raises `HetpipeError` for a member that would have two
    rows.
    """

    def __init__(self, members: Sequence[str | Sequence[str]], in_turn: bool) -> None:
        self.members = [(stage,) if isinstance(stage, str) else tuple(stage) for stage in members]
        groups = dict.fromkeys(self.members)
        if in_turn:
            groups = dict.fromkeys((member,) for replicas in self.members for member in replicas)
        self._groups = list(groups)
        everyone = [member for replicas in self._groups for member in replicas]
        if len(set(everyone)) != len(everyone):
            raise HetpipeError(
                f"members {[list(replicas) for replicas in self._groups]}: a stage may list a "
                "member once, and stages that share a member must have all members in common"
            )
        self.row_of = {
            member: row for row, replicas in enumerate(self._groups) for member in replicas
        }

    @property
    def rows(self) -> int:
        """The number of rows that a schedule must have."""
        return len(self._groups)

    def replicas_of(self, member: str) -> list[Replica]:
        """Return the member's replica of each of its stages."""
        return [
            Replica(n, replicas.index(member))
            for n, replicas in enumerate(self.members)
            if member in replicas
        ]

    def active(self, member: str, shares: Shares, mini_batch: int) -> list[Replica]:
        """Return a member's replicas that take part in a mini-batch."""
        return [
            replica for replica in self.replicas_of(member) if shares.takes(replica, mini_batch)
        ]


Key = tuple[str, str]
"""Role and name of a value."""


@dataclass(frozen=True)
class StageMove:
    """How a stage gets its values."""

    stays: bool  # whether the member keeps the stage, compiled
    held: tuple[Key, ...]  # values that the member has already
    comes: tuple[Key, ...]  # values that travel to the member


def stage_moves(
    before: Assembly,
    placed: Sequence[Sequence[str]],
    after: Assembly,
    members: Sequence[Sequence[str]],
) -> list[StageMove]:
    """Return the move of each stage, from the members `placed` so far to `members`.

    Raises `HetpipeError` for replicas, and for a member of several stages.
    """
    at = {replicas[0]: n for n, replicas in enumerate(placed)}
    for places in (placed, members):
        if max(map(len, places)) > 1 or len(set(places)) < len(places):
            raise HetpipeError(
                f"stages on {[list(replicas) for replicas in places]}: only "
                "stages without replicas can move; load the stages again"
            )
    moves = []
    for n, (member,) in enumerate(members):
        old = at.get(member)
        has = set() if old is None else set(before.places.kept(old))
        keys = after.places.kept(n)
        stays = old == n and _outline(before.stages[n][0]) == _outline(after.stages[n][0])
        moves.append(
            StageMove(
                stays,
                tuple(key for key in keys if key in has),
                # Gradients do not travel: they must be zero when a stage moves (`Crew.move`).
                tuple(key for key in keys if key not in has and key[0] != GRAD),
            )
        )
    return moves


def travelling_names(moves: Iterable[StageMove]) -> dict[str, list[str]]:
    """Return the names of the values that travel, each once, by role."""
    by_role: dict[str, dict[str, None]] = {}
    for move in moves:
        for role, name in move.comes:
            by_role.setdefault(role, {})[name] = None
    return {role: list(names) for role, names in by_role.items()}


def _outline(stage: StageGraphs) -> tuple[Any, ...]:
    """Return the slots of a stage's programs, and its constants: equal for equal stages."""
    slots = {name: (program.inputs, program.outputs) for name, program in stage.programs.items()}
    return stage.stage, slots, sorted(stage.constants)
