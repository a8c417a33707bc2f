"""Media: work that shares devices, buses and links evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappush

Event = tuple[float, int, int]
"""Seconds, the number of a row or a flow, and ALONE or the flow's state for which it was set."""

ALONE = -1
"""In an event: nothing but the time decides when it happens."""

Medium = int | str  # a worker's device, or a shared medium by name


@dataclass(slots=True)
class _Flow:
    media: Sequence[Medium]
    left_s: float  # seconds of work that were left at `since_s`, if it were alone
    since_s: float
    is_open: bool  # more work may come, so it does not end
    among: int = 1  # it goes on at 1 / this number
    state: int = 0


class Media:
    """Flows, each at 1 / the greatest number of flows among its media.

    An event is set for the end of each flow. When the speed of a flow changes, its state does too,
    and the event that was set before means nothing.
    """

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._flows: dict[int, _Flow] = {}
        self._on: dict[Medium, dict[int, _Flow]] = {}
        self._states = 0

    def begin(
        self,
        number: int,
        work_s: float,
        media: Sequence[Medium],
        now_s: float,
        is_open: bool = False,
    ) -> None:
        """Begin a flow that would take `work_s` alone."""
        flow = self._flows[number] = _Flow(media, work_s, now_s, is_open)
        for medium in media:
            flows = self._on.setdefault(medium, {})
            flows[number] = flow
            flow.among = max(flow.among, len(flows))
        self._set(number, flow)
        self._share(media, now_s)

    def ends(self, number: int, state: int, now_s: float) -> bool:
        """Whether the flow ends now: its event was set for its present state, and it is closed."""
        flow = self._flows.get(number)
        if flow is None or flow.state != state:
            return False
        if flow.is_open:
            flow.left_s, flow.since_s = 0.0, now_s
            return False
        del self._flows[number]
        for medium in flow.media:
            del self._on[medium][number]
        self._share(flow.media, now_s)
        return True

    def close(self, number: int, least_s: float, now_s: float) -> None:
        """Let an open flow end, after `least_s` seconds of work from now or more."""
        flow = self._flows[number]
        done_s = (now_s - flow.since_s) / flow.among
        flow.left_s, flow.since_s = max(flow.left_s - done_s, least_s), now_s
        flow.is_open = False
        self._set(number, flow)

    def _share(self, media: Sequence[Medium], now_s: float) -> None:
        """Give all flows on these media their present speed."""
        for medium in media:
            flows = self._on[medium]
            for number, flow in flows.items():
                among = len(flows)
                if len(flow.media) > 1:
                    among = max(len(self._on[own]) for own in flow.media)
                if among != flow.among:
                    done_s = (now_s - flow.since_s) / flow.among
                    flow.left_s, flow.since_s = max(0.0, flow.left_s - done_s), now_s
                    flow.among = among
                    self._set(number, flow)

    def _set(self, number: int, flow: _Flow) -> None:
        """Set the event of the flow's end at its present speed."""
        self._states = flow.state = self._states + 1
        heappush(self._events, (flow.since_s + flow.left_s * flow.among, number, flow.state))
