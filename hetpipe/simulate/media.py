"""Media: divides the speed of devices, buses and links evenly among their work.

A flow is work on any number of media: a pass on a device, or a message or a sum on links.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from hetpipe.schedule.action import Action
from hetpipe.simulate.times import Transfer

Event = tuple[float, int, int]
"""Time in seconds; number of a row or flow; and ALONE, or the state that the flow (or its only
medium) had when the event was set."""

ALONE = -1  # the state of an event whose time never changes

Medium = int | str  # a worker's device, or a shared medium by name


@dataclass(slots=True)
class _Flow:
    """A flow on several media or on none, or an open flow."""

    media: Sequence[Medium]
    left_s: float  # remaining seconds of work at `since_s`, on free media
    since_s: float
    is_open: bool  # more work may come, so the flow does not end yet
    among: int = 1  # the flow's speed is 1 / this number
    state: int = 0


@dataclass(slots=True)
class _Shared:
    """A medium. The flows that use no other medium all have the same speed.

    The common work is the work of a flow that has run since the first of these flows began. The
    flows' ends are stored in common work, so that a change of speed does not change the stored
    ends: a flow that begins at 5 s of common work, and would take 2 s alone, ends at 7 s of common
    work.
    """

    flows: dict[int, _Flow] = field(default_factory=dict)  # by number: flows that are not in `ends`
    ends: list[tuple[float, int]] = field(default_factory=list)  # heap: common work, number
    done_s: float = 0.0  # common work at `since_s`
    since_s: float = 0.0
    among: int = 1
    state: int = 0

    @property
    def count(self) -> int:
        """The number of flows."""
        return len(self.flows) + len(self.ends)

    def go_on(self, now_s: float) -> None:
        """Advance the common work to `now_s`."""
        if self.ends:
            self.done_s += (now_s - self.since_s) / self.among
        else:
            self.done_s = 0.0
        self.since_s = now_s


class Media:
    """All flows. A flow's speed is 1 / the largest number of flows on any of its media.

    Each flow on several media has an event for its end. On each medium, the flows that use only
    this medium have one event together, for the first of their ends. When the speed of a flow
    changes, its state changes as well, so the earlier event becomes invalid.
    """

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._flows: dict[int, _Flow] = {}
        self._alone: dict[int, _Shared] = {}  # by number: the medium of a flow that uses only one
        self._on: dict[Medium, _Shared] = defaultdict(_Shared)
        self._states = 0

    def begin(
        self,
        number: int,
        work_s: float,
        media: Sequence[Medium],
        now_s: float,
        is_open: bool = False,
    ) -> None:
        """Begin a flow that takes `work_s` seconds if no other flow uses its media."""
        if len(media) == 1 and not is_open:
            shared = self._on[media[0]]
            shared.go_on(now_s)
            heappush(shared.ends, (shared.done_s + work_s, number))
            self._alone[number] = shared
            self._share_one(shared, now_s)
            return
        flow = self._flows[number] = _Flow(media, work_s, now_s, is_open)
        for medium in media:
            shared = self._on[medium]
            shared.flows[number] = flow
            flow.among = max(flow.among, shared.count)
        self._set(number, flow)
        self._share(media, now_s)

    def ends(self, number: int, state: int, now_s: float) -> bool:
        """End a flow that is not open and is in this state; return whether the flow ended."""
        if (shared := self._alone.get(number)) is not None:
            if shared.state != state:
                return False
            del self._alone[number]
            shared.done_s, shared.since_s = heappop(shared.ends)[0], now_s
            self._share_one(shared, now_s)
            return True
        flow = self._flows.get(number)
        if flow is None or flow.state != state:
            return False
        if flow.is_open:
            flow.left_s, flow.since_s = 0.0, now_s
            return False
        del self._flows[number]
        for medium in flow.media:
            del self._on[medium].flows[number]
        self._share(flow.media, now_s)
        return True

    def close(self, number: int, least_s: float, now_s: float) -> None:
        """Close an open flow; at least `least_s` seconds of work remain."""
        flow = self._flows[number]
        done_s = (now_s - flow.since_s) / flow.among
        flow.left_s, flow.since_s = max(flow.left_s - done_s, least_s), now_s
        flow.is_open = False
        self._set(number, flow)

    def _share(self, media: Sequence[Medium], now_s: float) -> None:
        """Update the speed of all flows on these media."""
        for medium in media:
            self._share_one(self._on[medium], now_s)

    def _share_one(self, shared: _Shared, now_s: float) -> None:
        """Update the speed of all flows on a medium."""
        count = len(shared.flows) + len(shared.ends)
        if shared.ends:
            if shared.since_s != now_s:
                shared.go_on(now_s)
            shared.among = count
            end_s, first = shared.ends[0]
            self._states = shared.state = self._states + 1
            left_s = max(0.0, end_s - shared.done_s)
            heappush(self._events, (now_s + left_s * count, first, shared.state))
        for number, flow in shared.flows.items():
            among = count
            if len(flow.media) > 1:
                among = max(self._on[own].count for own in flow.media)
            if among != flow.among:
                done_s = (now_s - flow.since_s) / flow.among
                flow.left_s, flow.since_s = max(0.0, flow.left_s - done_s), now_s
                flow.among = among
                self._set(number, flow)

    def _set(self, number: int, flow: _Flow) -> None:
        """Set the event of the flow's end at its present speed."""
        self._states = flow.state = self._states + 1
        heappush(self._events, (flow.since_s + flow.left_s * flow.among, number, flow.state))


Channel = int | tuple[int, int]
"""A worker, which takes part in one sum at a time, or an edge from worker to worker, which carries
one message at a time."""


@dataclass(slots=True)
class Load:
    """A message or a sum that waits for its channels or is under way."""

    action: Action
    key: int
    rows: Sequence[int]  # sender and receiver, or all rows of a sum
    transfer: Transfer
    channels: Sequence[Channel]
    hold_s: float = 0.0  # seconds for which the load keeps its channels after leaving the media
    is_open: bool = False  # whether its pass is still running
    start_s: float | None = None  # when the load got all its channels; None: it waits for them


class Network:
    """Channels with their queues of loads. A load that is first in all its queues uses its
    media."""

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
        """Record that an open load's pass has ended: the rest takes at least `least_s`."""
        load = self._loads[number]
        load.is_open = False
        if load.start_s is not None:
            self._media.close(number, least_s, now_s)

    def leave(self, number: int, now_s: float) -> Load | None:
        """Free the channels of a load that has left its media, and begin the next loads. Returns
        None if the load keeps its channels for a time."""
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
