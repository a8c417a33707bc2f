"""A check: one rule of the contract, and a function that breaks a device that breaks the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from hetpipe.errors import BackendError

if TYPE_CHECKING:
    from hetpipe.conformance.rig import Rig


class Level(IntEnum):
    """How much is checked; each level includes those before it."""

    CORE = 0
    TRAINING = 1
    FULL = 2

    @classmethod
    def named(cls, name: str) -> Level:
        """The level of that name, in small letters. Raises `BackendError` for another name."""
        levels = {level.name.lower(): level for level in cls}
        if name not in levels:
            raise BackendError(f"no level {name!r}; the levels are {', '.join(levels)}")
        return levels[name]


class BrokenRule(Exception):
    """What a check has seen that no device may do."""


class NotAsked(Exception):
    """Why a check does not concern this device: nothing that it declares is tested by it."""


@dataclass(frozen=True)
class Check:
    """`rule` is a sentence of the contract; `suspect` names the fault behind most failures."""

    name: str
    level: Level
    rule: str
    suspect: str
    function: Callable[[Rig], None]
    family: str = ""
    """Of an operator: the row of the coverage matrix."""

    @property
    def group(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]


CHECKS: list[Check] = []


def check(
    name: str, rule: str, suspect: str, level: Level = Level.CORE
) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    """Decorates the function of a check."""

    def add(function: Callable[[Rig], None]) -> Callable[[Rig], None]:
        CHECKS.append(Check(name, level, rule, suspect, function))
        return function

    return add


def expect(holds: bool, seen: str) -> None:
    """Raise `BrokenRule` with the observation unless the rule holds."""
    if not holds:
        raise BrokenRule(seen)
