"""Connects the ends of wires between workers of one host."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from hetpipe.cluster.transports import Transport
from hetpipe.wire.messages import EdgeEnd, Edges, WireEnd
from hetpipe.wire.transport import Port


class Plugboard:
    """Wires whose first end is connected and whose second end is still to come."""

    def __init__(self, transport: Transport) -> None:
        self._transport = import_module(transport.module)
        self._waiting: dict[int, tuple[Port, list[int]]] = {}

    @contextmanager
    def connect(self, ends: Sequence[WireEnd]) -> Iterator[tuple[Edges, list[int]]]:
        """Yield the connected ends of one worker, and descriptors to give away with them.

        The descriptors are closed at the end.
        """
        edges: list[EdgeEnd] = []
        descriptors: list[int] = []
        try:
            for end in ends:
                port, fds = self._plug(end)
                descriptors += fds
                among = len(descriptors) - len(fds), len(descriptors)
                edges.append(EdgeEnd(end.wire, port, end.link, among))
            yield Edges(tuple(edges)), descriptors
        finally:
            _close(descriptors)

    def _plug(self, end: WireEnd) -> tuple[Port | None, list[int]]:
        plug = end.plug
        if plug is None:
            return None, []
        if plug.tag in self._waiting:
            return self._waiting.pop(plug.tag)
        sending, receiving = self._transport.plugs(
            end.wire, plug.ranks, plug.tag, plug.pieces, plug.direct
        )
        own, other = (sending, receiving) if plug.sends else (receiving, sending)
        self._waiting[plug.tag] = other
        return own[0], own[1]

    def close(self) -> None:
        """Close the ends that no worker has got."""
        for _, descriptors in self._waiting.values():
            _close(descriptors)
        self._waiting.clear()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
