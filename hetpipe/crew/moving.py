"""Plans how workers get other stages of the same model, while values stay on the members that have
them (station 2 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hetpipe.capture.program import GRAD, Program, StageGraphs
from hetpipe.crew.assembly import Assembly
from hetpipe.errors import HetpipeError

Key = tuple[str, str]
"""Role and name of a value."""


@dataclass(frozen=True)
class StageMove:
    """How a stage gets its values: its member has `held` already, the others arrive."""

    stays: bool
    """Whether the member keeps the stage, compiled."""
    held: tuple[Key, ...]
    comes: tuple[Key, ...]


def stage_moves(
    before: Assembly,
    placed: Sequence[Sequence[str]],
    after: Assembly,
    members: Sequence[Sequence[str]],
) -> list[StageMove]:
    """Return the move of each stage, from the members `placed` so far to others.

    Raises `HetpipeError` for replicas, and for a member of several stages.
    """
    at = {replicas[0]: n for n, replicas in enumerate(placed)}
    for places in (placed, members):
        if max(map(len, places)) > 1 or len(set(places)) < len(places):
            raise HetpipeError(
                f"stages on {[list(replicas) for replicas in places]}: only those of one member "
                "each can move; load them anew"
            )
    moves = []
    for n, (member,) in enumerate(members):
        old = at.get(member)
        has = set() if old is None else set(before.kept(old))
        keys = after.kept(n)
        stays = old == n and same_stage(before.stages[n][0], after.stages[n][0])
        moves.append(
            StageMove(
                stays,
                tuple(key for key in keys if key in has),
                # Gradients are zero at rest.
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


def same_stage(one: StageGraphs, other: StageGraphs) -> bool:
    """Return whether two stages of a capture compute equal names from equal names."""
    return _outline(one) == _outline(other)


def _outline(stage: StageGraphs) -> tuple[Any, ...]:
    passes = {
        size: [_slots(p) for p in passes_of.programs] for size, passes_of in stage.passes.items()
    }
    whole = [_slots(p) for p in (stage.update, stage.predict, stage.norm) if p is not None]
    evaluation = {size: _slots(p) for size, p in stage.evaluation.items()}
    return stage.stage, passes, whole, evaluation, sorted(stage.constants)


def _slots(program: Program) -> tuple[Any, ...]:
    return program.inputs, program.outputs
