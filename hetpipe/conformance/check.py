"""A check: one rule of the contract, and a function that tests whether a device keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from hetpipe.conformance.outcomes import BrokenRule
from hetpipe.errors import BackendError

if TYPE_CHECKING:
    from hetpipe.conformance.rig import Rig


class Level(IntEnum):
    """Extent of a run; each level includes the checks of the lower levels."""

    CORE = 0
    TRAINING = 1
    FULL = 2

    @classmethod
    def named(cls, name: str) -> Level:
        """Return the level with a lower-case name. Raises `BackendError` for an unknown name."""
        levels = {level.name.lower(): level for level in cls}
        if name not in levels:
            raise BackendError(f"no level {name!r}; the levels are {', '.join(levels)}")
        return levels[name]


@dataclass(frozen=True)
class Check:
    """A check. `rule` is a sentence of the contract; `suspect` names the most likely fault."""

    name: str
    level: Level
    rule: str
    suspect: str
    function: Callable[[Rig], None]
    family: str = ""
    """Row of the coverage matrix, for checks of operators."""

    @property
    def group(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]


CHECKS: list[Check] = []


def check(
    name: str, rule: str, suspect: str, level: Level = Level.CORE
) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    """Add the decorated function to `CHECKS`."""

    def add(function: Callable[[Rig], None]) -> Callable[[Rig], None]:
        CHECKS.append(Check(name, level, rule, suspect, function))
        return function

    return add


def expect(holds: bool, seen: str) -> None:
    """Raise `BrokenRule` with the observation unless the rule holds."""
    if not holds:
        raise BrokenRule(seen)
