"""Broken wires that workers have reported, until it is known why they broke."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hetpipe.wire.ends import Severed

CAUSE_S = 6.0
"""Seconds until a broken wire has a cause: a lost worker or host is usually found one second
earlier (docs/hosts.md)."""


class Break(NamedTuple):
    """A worker's end of a wire broke: the two workers, and the reason that the first one gives."""

    worker: int
    neighbour: int
    reason: str


class Breaks:
    """Waits for the cause of broken wires.

    Usually a worker or a host is lost, and its neighbours only see that first. If no loss is found
    within `CAUSE_S`, `blame` is called once with all broken wires, on a thread that may wait.
    """

    def __init__(self, blame: Callable[[Sequence[Break]], None]) -> None:
        self._blame = blame
        self._found: list[Break] = []
        # Held while a break is noted or the timer changes; never while `blame` runs.
        self._changing = threading.Lock()
        self._timer: threading.Timer | None = None

    def add(self, worker: int, severed: Severed) -> None:
        """Note a broken wire."""
        with self._changing:
            self._found.append(Break(worker, severed.neighbour, severed.reason))
            if self._timer is None:
                self._timer = threading.Timer(CAUSE_S, lambda: self._blame(self._found))
                self._timer.name, self._timer.daemon = "hetpipe cause", True
                self._timer.start()

    def cancel(self) -> None:
        """Wait no longer, since a cause is known."""
        with self._changing:
            if self._timer is not None:
                self._timer.cancel()


def culprit(breaks: Collection[Break], places: Sequence[str], own: str) -> list[int]:
    """Return the workers to remove if wires broke and all hosts live; `places` has their hosts.

    Between hosts these are all workers of one host: the one with the most broken links to other
    hosts, then the one with the fewest workers, then the last one; never the controller's host
    `own`. Inside a host it is the worker that reports the break.
    """
    links = {frozenset((places[each.worker], places[each.neighbour])) for each in breaks}
    counts = Counter(host for link in links if len(link) == 2 for host in link if host != own)
    if not counts:
        return [next(iter(breaks)).worker]
    worst = max(counts, key=lambda host: (counts[host], -places.count(host), places.index(host)))
    return [worker for worker, place in enumerate(places) if place == worst]
