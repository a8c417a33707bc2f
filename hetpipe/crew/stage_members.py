"""Assigns members to stages, and to rows of a schedule (station 2 of
docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Sequence

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
                f"members {[list(replicas) for replicas in self._groups]}: one that has several "
                "stages must have the same fellow replicas in all of them, and be there once"
            )
        self.row_of = {
            member: row for row, replicas in enumerate(self._groups) for member in replicas
        }
        """The row of each member, in the order of the rows."""

    @property
    def rows(self) -> int:
        """Number of rows that a schedule must have."""
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
