"""Network: queues messages and sums for their edges, and then puts them on their media."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.schedule.action import Action
from hetpipe.simulate.media import Media
from hetpipe.simulate.times import Transfer

Channel = int | tuple[int, int]
"""Carries one load at a time: a worker's sums, or an edge from worker to worker."""


@dataclass(slots=True)
class Load:
    """A message or a sum under way."""

    action: Action
    key: int
    rows: Sequence[int]  # sender and receiver, or all rows of a sum
    transfer: Transfer
    channels: Sequence[Channel]
    hold_s: float = 0.0  # seconds for which it holds its channels after leaving the media
    is_open: bool = False  # whether its pass is still running
    start_s: float | None = None  # when it got all its channels


class Network:
    """Channels with their queues of loads. The first load of each queue is on its media."""

    def __init__(self, media: Media, first_number: int) -> None:
        self._media = media
        self._next = first_number  # a load and its flow have the same number
        self._loads: dict[int, Load] = {}
        self._queues: dict[Channel, deque[int]] = defaultdict(deque)

    def put(self, load: Load, now_s: float) -> int:
        """Queue a load, begin it if its channels are free, and return its number."""
        number, self._next = self._next, self._next + 1
        self._loads[number] = load
        for channel in load.channels:
            self._queues[channel].append(number)
        self._begin(number, now_s)
        return number

    def close(self, number: int, least_s: float, now_s: float) -> None:
        """Note that the pass of an open load has ended: the last part takes `least_s` or more."""
        load = self._loads[number]
        load.is_open = False
        if load.start_s is not None:
            self._media.close(number, least_s, now_s)

    def leave(self, number: int, now_s: float) -> Load | None:
        """Free the channels of a load that has left its media, and begin the next loads.

        Returns None if it still holds them for a time.
        """
        load = self._loads[number]
        if load.hold_s:
            self._media.begin(number, load.hold_s, (), now_s)
            load.hold_s = 0.0
            return None
        del self._loads[number]
        for channel in load.channels:
            self._queues[channel].popleft()
        for channel in load.channels:
            if self._queues[channel]:
                self._begin(self._queues[channel][0], now_s)
        return load

    def _begin(self, number: int, now_s: float) -> None:
        load = self._loads[number]
        if load.start_s is not None:
            return
        for channel in load.channels:
            if self._queues[channel][0] != number:
                return
        load.start_s = now_s
        work_s, media = load.transfer.occupancy_s, load.transfer.media
        self._media.begin(number, work_s, media, now_s, load.is_open)
