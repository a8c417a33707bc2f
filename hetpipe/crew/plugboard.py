"""Connects the ends of wires at the host of their workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module

from hetpipe.cluster.transports import Transport
from hetpipe.hosts.wires import Wires
from hetpipe.wire.ends import EdgeEnd, Edges, Plug, Route, WireEnd
from hetpipe.wire.near import NearPort
from hetpipe.wire.stream import StreamPort
from hetpipe.wire.transport import Port


@dataclass(frozen=True)
class Outside:
    """How a host reaches others: its arriving wires, and the secret of the cluster."""

    wires: Wires
    secret: bytes = field(repr=False)


class Plugboard:
    """Connects both ends of wires inside a host, and this host's ends of wires to other hosts."""

    def __init__(self, transport: Transport, outside: Outside | None = None) -> None:
        self._transport = transport
        self._outside = outside
        self._waiting: dict[int, tuple[Port, list[int]]] = {}  # the second ends of wires, by tag

    @contextmanager
    def connect(self, ends: Sequence[WireEnd]) -> Iterator[tuple[Edges, list[int]]]:
        """Yield the connected ends of one worker, and descriptors to give away with them.

        The descriptors are closed at the end.
        """
        edges: list[EdgeEnd] = []
        descriptors: list[int] = []
        try:
            for end in ends:
                port, fds = (None, []) if end.plug is None else self._plug(end, end.plug)
                descriptors += fds
                among = len(descriptors) - len(fds), len(descriptors)
                neighbour = -1 if end.plug is None else end.plug.ranks[end.plug.sends]
                edges.append(EdgeEnd(end.wire, port, end.link, among, neighbour))
            yield Edges(tuple(edges)), descriptors
        finally:
            _close(descriptors)

    def _plug(self, end: WireEnd, plug: Plug) -> tuple[Port, list[int]]:
        if plug.route is not None:
            return self._leave(plug, plug.route)
        if plug.tag in self._waiting:
            return self._waiting.pop(plug.tag)
        module = import_module(self._transport.module)
        sending, receiving = module.plugs(end.wire, plug.ranks, plug.tag, plug.pieces, plug.direct)
        own, self._waiting[plug.tag] = (sending, receiving) if plug.sends else (receiving, sending)
        return own[0], own[1]

    def _leave(self, plug: Plug, route: Route) -> tuple[Port, list[int]]:
        """Return an end of a wire to another host."""
        assert self._outside is not None
        outside, encrypted = self._outside, self._transport.encrypts
        address = route.address if plug.sends else None
        stream = StreamPort(route.name, outside.secret, encrypted, address, route.ahead_s)
        is_ring = route.near and not self._transport.streams
        port = NearPort(stream) if is_ring else stream
        return port, [] if plug.sends else [outside.wires.expect(route.name)]

    def close(self) -> None:
        """Close the ends that no worker has got."""
        for _, descriptors in self._waiting.values():
            _close(descriptors)
        self._waiting.clear()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
