"""Copies of the stages' values in this process's memory, which outlive the workers."""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from hetpipe.capture.program import Slot
from hetpipe.wire.channel import aligned
from hetpipe.wire.copy_messages import Copied, Key, Stored
from hetpipe.wire.wire import Array, host_dtype

RECENT = 3
"""The number of latest copies that tell how long a copy takes."""
TICK_S = 0.1
"""Seconds between two looks whether a worker is lost, while a copy is awaited."""


@dataclass(frozen=True)
class Kept:
    """A complete copy. `took_s` are the seconds from the request to the last value."""

    values: Mapping[Key, Array]
    mark: object
    took_s: float

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return sum(value.nbytes for value in self.values.values())


@dataclass(frozen=True)
class Memory:
    """A memory that was lent to a worker."""

    number: int
    content: mmap.mmap


class Memories:
    """The memories that were lent to the workers of one loading, at most `most` for each."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._loading: object = None
        self._of: dict[int, list[Memory]] = {}  # by worker, the one to use next first
        self.are_new = False  # whether one has been lent for the copy that begins next

    def next(
        self, worker: int, loading: object, lend: Callable[[], Memory | None]
    ) -> Memory | None:
        """Return the memory for a worker's next copy; with two, the last copy has the other one.

        `lend` lends a memory; it returns None if the worker has to send pieces.
        """
        if loading != self._loading:
            self._loading, self._of = loading, {}
        own = self._of.setdefault(worker, [])
        if len(own) < self.most:
            if (lent := lend()) is None:
                return None
            own.insert(0, lent)
            self.are_new = True
        own.append(memory := own.pop(0))
        return memory


class Copies:
    """The latest complete copy, and a copy that arrives; at most `most` of them are in memory.

    With two, the latest copy stays while the next one arrives.
    """

    def __init__(self, most: int = 2) -> None:
        # Held while values are added or a copy becomes complete; a thread waits for the latter.
        self._changed = threading.Condition()
        self._number = 0
        self._missing: set[Key] = set()
        self._places: dict[Key, Array] = {}  # of values that come in lent memory
        self._arriving: dict[Key, Array] = {}
        self._mark: object = None
        self._begin_s = 0.0
        self._is_first = False  # whether the copy is the first into a memory
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self.memories = Memories(most)
        self.latest: Kept | None = None

    @property
    def typical_s(self) -> float:
        """Seconds of a copy: the median of the latest ones, or the shorter of two, since a single
        one may take longer. The first copies into lent memory do, and do not count. 0 before the
        others."""
        return median_low(self._recent_s) if self._recent_s else 0.0

    def begin(
        self, number: int, keys: Collection[Key], places: Mapping[Key, Array], mark: object
    ) -> None:
        """Begin a copy of these values, and forget an incomplete one.

        No other copy of the crew has its number. `places` has the values that come in lent memory.
        """
        with self._changed:
            self._number = number
            self._missing, self._arriving, self._mark = set(keys), {}, mark
            if self.memories.most == 1:
                self.latest = None
            self._places = dict(places)
            self._begin_s, self._is_first = time.monotonic(), self.memories.are_new
            self.memories.are_new = False
            if not keys:
                self._complete()

    def arrived(self, news: Copied | Stored) -> None:
        """Add values, unless their copy is forgotten."""
        with self._changed:
            if news.number != self._number:
                return
            if isinstance(news, Stored):
                self._arriving.update({key: self._places[key] for key in news.keys})
                self._missing.difference_update(news.keys)
            else:
                self._arriving.update(news.values)
                self._missing -= news.values.keys()
            if not self._missing:
                self._complete()

    def _complete(self) -> None:
        took_s = time.monotonic() - self._begin_s
        self.latest = Kept(self._arriving, self._mark, took_s)
        if not self._is_first:
            self._recent_s.append(took_s)
        self._number, self._arriving, self._places = 0, {}, {}
        self._changed.notify_all()

    def abandon(self) -> None:
        """Forget an incomplete copy and the lent memories, whose workers are lost."""
        with self._changed:
            self._number = 0
            self._missing, self._arriving, self._places = set(), {}, {}
            self.memories = Memories(self.memories.most)

    @property
    def under_way(self) -> bool:
        """Whether a copy is incomplete."""
        return bool(self._missing)

    def wait(self, check: Callable[[float], None]) -> None:
        """Wait until the copy is complete.

        `check` gets the seconds without a new value, and raises the error of a lost worker. They
        are counted, so time in which this process is stopped is left out.
        """
        silent_s = 0.0
        while True:
            with self._changed:
                if not (missing := len(self._missing)):
                    return
                self._changed.wait(TICK_S)
                silent_s = silent_s + TICK_S if len(self._missing) == missing else 0.0
            check(silent_s)


def laid_out(slots: Mapping[Key, Slot]) -> tuple[dict[Key, int], int]:
    """Return a place in memory for each value, in bytes, and the size of the memory."""
    places: dict[Key, int] = {}
    nbytes = 0
    for key, slot in slots.items():
        places[key] = nbytes
        nbytes = aligned(nbytes + slot.nbytes)
    return places, nbytes


def arrays_in(
    memory: Memory, places: Mapping[Key, int], slots: Mapping[Key, Slot]
) -> dict[Key, Array]:
    """Return the values of a memory as arrays."""
    content = np.frombuffer(memory.content, np.uint8)
    arrays = {}
    for key, place in places.items():
        slot = slots[key]
        raw = content[place : place + slot.nbytes]
        arrays[key] = raw.view(host_dtype(slot.dtype)).reshape(slot.shape)
    return arrays
