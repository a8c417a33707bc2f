"""The time after which a pass counts as stuck, by the latest results."""

from __future__ import annotations

from collections.abc import Collection

RECENT = 8
"""The number of latest results that tell how long a pass may take. The first ones on new workers
set no limit, since devices may still compile."""
STUCK_S, STUCK = 60.0, 50
"""A pass is stuck after these seconds, if they are also as many times the longest recent result."""


def stuck_after_s(recent_s: Collection[float]) -> float | None:
    """Return the seconds after which a pass is stuck; None if fewer than `RECENT` are known."""
    return max(STUCK_S, STUCK * max(recent_s)) if len(recent_s) >= RECENT else None
