"""Hysteresis: decides when to follow a better plan, so that noise moves no layer."""

from __future__ import annotations


class Hysteresis:
    """Counts windows of mini-batches. Layers move after two windows in a row that promise enough.

    The window after a move judges it, and a pause follows: twice as long as the last pause if the
    move did not keep its promise.
    """

    def __init__(self) -> None:
        self.pause = 1
        """Length of the pause, in windows."""
        self._left = 0
        self._streak = 0

    def waits(self) -> bool:
        """Whether the window that has ended belongs to a pause. Call it once per window."""
        self._left = max(self._left - 1, -1)
        return self._left >= 0

    def judged(self, kept: bool) -> None:
        """Note that the window after a move has ended; `kept` says whether the promise was kept."""
        self.pause = 1 if kept else 2 * self.pause
        self._left, self._streak = self.pause, 0

    def follows(self, promises: bool) -> bool:
        """Whether to move now, after a window whose best plan `promises` enough."""
        self._streak = self._streak + 1 if promises else 0
        return self._streak > 1
