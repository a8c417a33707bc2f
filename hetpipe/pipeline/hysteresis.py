"""Hysteresis: when a promise of another plan is followed, so that noise moves nothing."""

from __future__ import annotations


class Hysteresis:
    """Counts windows of mini-batches. A promise is followed in the second window in a row.

    The window after a move judges it, and a pause follows. It is twice as long as the last one if
    the promise was not kept.
    """

    def __init__(self) -> None:
        self.pause = 1
        """In windows."""
        self._left = 0
        self._streak = 0

    def waits(self) -> bool:
        """Whether the window that has ended belongs to a pause. To be called once for each."""
        self._left = max(self._left - 1, -1)
        return self._left >= 0

    def judged(self, kept: bool) -> None:
        """The window after a move has ended."""
        self.pause = 1 if kept else 2 * self.pause
        self._left, self._streak = self.pause, 0

    def follows(self, promises: bool) -> bool:
        """Whether to move now, after a window that promises enough, or does not."""
        self._streak = self._streak + 1 if promises else 0
        return self._streak > 1
