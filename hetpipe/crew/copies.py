"""Copies of the stages' values in this process's memory, which outlive the workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from hetpipe.wire.copy_messages import Copied
from hetpipe.wire.messages import Array
from hetpipe.worker.bind import Key

TICK_S = 0.1
"""Seconds between two looks whether a worker is lost, while a copy is awaited."""


@dataclass(frozen=True)
class Kept:
    """A complete copy. `took_s` are the seconds from the request to the last piece."""

    values: Mapping[Key, Array]
    mark: object
    took_s: float

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(value.nbytes for value in self.values.values())


class Copies:
    """The latest complete copy, and a copy that arrives in pieces.

    An incomplete copy never replaces a complete one, so two copies are in memory at most.
    """

    def __init__(self) -> None:
        # Held while pieces are added or a copy becomes complete; a thread waits for the latter.
        self._changed = threading.Condition()
        self._number = 0
        self._missing: set[Key] = set()
        self._arriving: dict[Key, Array] = {}
        self._mark: object = None
        self._begin_s = 0.0
        self.latest: Kept | None = None

    def begin(self, keys: Collection[Key], mark: object) -> int:
        """Begin a copy of these values, and forget an incomplete one. Return its number."""
        with self._changed:
            self._number += 1
            self._missing, self._arriving, self._mark = set(keys), {}, mark
            self._begin_s = time.monotonic()
            if not keys:
                self._complete()
            return self._number

    def arrived(self, piece: Copied) -> None:
        """Add a piece, unless its copy is forgotten."""
        with self._changed:
            if piece.number != self._number:
                return
            self._arriving.update(piece.values)
            self._missing -= piece.values.keys()
            if not self._missing:
                self._complete()

    def _complete(self) -> None:
        took_s = time.monotonic() - self._begin_s
        self.latest = Kept(self._arriving, self._mark, took_s)
        self._number, self._arriving = self._number + 1, {}
        self._changed.notify_all()

    def abandon(self) -> None:
        """Forget an incomplete copy, whose workers are lost."""
        with self._changed:
            self._number += 1
            self._missing, self._arriving = set(), {}

    @property
    def under_way(self) -> bool:
        """Whether a copy is incomplete."""
        return bool(self._missing)

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until the copy is complete. `check` raises the error of a lost worker."""
        with self._changed:
            while self._missing:
                self._changed.wait(TICK_S)
                check()
