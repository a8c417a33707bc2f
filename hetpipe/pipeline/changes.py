"""Records of devices that leave a training, and of devices that join it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetpipe.words import words

if TYPE_CHECKING:
    from hetpipe.plan.plan import Plan


@dataclass(frozen=True)
class Lost:
    """A loss that a training has survived."""

    members: tuple[str, ...]
    why: str
    step: int
    """The number of mini-batches that had been handed in."""
    plan: Plan
    """The plan afterwards."""
    took_s: float
    """Seconds until all recorded mini-batches were trained again."""
    replayed: int
    """The mini-batches that were trained again."""

    def __str__(self) -> str:
        again = "1 mini-batch" if self.replayed == 1 else f"{self.replayed} mini-batches"
        return (
            f"step {self.step}: lost {words(self.members)} ({self.why}); continued on "
            f"{words(dict.fromkeys(self.plan.all_devices))} after {self.took_s:.1f} s, with "
            f"{again} trained again"
        )


@dataclass(frozen=True)
class Joined:
    """Members that joined a training: they were lost before, and are back."""

    members: tuple[str, ...]
    step: int
    plan: Plan
    """The plan afterwards."""
    took_s: float
    """Seconds in which no mini-batch was trained."""

    def __str__(self) -> str:
        return (
            f"step {self.step}: {words(self.members)} joined; continued on "
            f"{words(dict.fromkeys(self.plan.all_devices))} after {self.took_s:.1f} s"
        )
