"""A check: one rule of the contract, and a function that tests whether a device keeps the rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

from hetpipe.errors import BackendError

Test = TypeVar("Test", bound=Callable[..., None])
"""A function that takes the `Rig` of the device under test."""


class BrokenRule(Exception):
    """The device has broken a check's rule; the message says what the check saw."""


class NotAsked(Exception):
    """The check does not apply to this device; the message gives the reason."""


class Level(IntEnum):
    """Extent of the suite; each level includes the checks of the lower levels."""

    CORE = 0
    TRAINING = 1
    FULL = 2

    @classmethod
    def named(cls, name: str) -> Level:
        """Return the level of a name such as `core`. Raises `BackendError` for an unknown name."""
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
    function: Callable[..., None]
    family: str = ""
    """Row of the coverage matrix, for checks of operators."""

    @property
    def group(self) -> str:
        """The part of the name before the slash."""
        return self.name.partition("/")[0]


CHECKS: list[Check] = []


def check(name: str, rule: str, suspect: str, level: Level = Level.CORE) -> Callable[[Test], Test]:
    """Return a decorator that adds a function to `CHECKS`."""

    def add(function: Test) -> Test:
        CHECKS.append(Check(name, level, rule, suspect, function))
        return function

    return add


def expect(holds: bool, seen: str) -> None:
    """Raise `BrokenRule` with the observation unless the rule holds."""
    if not holds:
        raise BrokenRule(seen)


def expect_refusal(use: Callable[[], Any], what: str) -> None:
    """Raise `BrokenRule` unless `use` raises `BackendError`."""
    try:
        use()
    except BackendError:
        return
    except Exception as error:
        kind = f"{type(error).__name__} ({error})"
        raise BrokenRule(f"{what} raises {kind}, not a BackendError") from error
    raise BrokenRule(f"{what} raises no error")
