"""Hands connections for wires to the workers that wait for them."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from hetpipe.hosts.door import Greeting, Visitor
from hetpipe.hosts.tls import TlsStream, shut
from hetpipe.sockets import socket_pair


class Wires:
    """Wires that a worker of this host waits for, or that have arrived first.

    A wire's name begins with its crew's name and "/".
    """

    def __init__(self) -> None:
        self._known: dict[str, set[str]] = {}  # by crew, the wires that have arrived so far
        self._expected: dict[str, socket.socket] = {}
        self._arrived: dict[str, socket.socket] = {}
        # Held while the dictionaries change; never while a socket waits.
        self._changing = threading.Lock()

    @property
    def visitor(self) -> Visitor:
        """The visitor of a door for wires."""
        return Visitor(self._check, self._visit)

    def open(self, crew: str) -> None:
        """Let wires of a crew arrive."""
        with self._changing:
            self._known[crew] = set()

    def expect(self, name: str) -> int:
        """Return a descriptor on which the socket of the wire `name` will come to a worker."""
        ours, theirs = socket_pair()
        with self._changing:
            arrived = self._arrived.pop(name, None)
            if arrived is None:
                self._expected[name] = ours
        if arrived is not None:
            _hand_over(arrived, ours)
        return theirs.detach()

    def _check(self, greeting: Greeting) -> str:
        name = greeting.call.wire
        with self._changing:
            if (known := self._known.get(_crew(name))) is None:
                return f"it has no crew with a wire {name!r}"
            return f"the wire {name!r} is connected already" if name in known else ""

    def _visit(self, stream: TlsStream, greeting: Greeting) -> None:
        name = greeting.call.wire
        with self._changing:
            if (known := self._known.get(_crew(name))) is None:  # its crew has ended just now
                stream.close()
                return
            known.add(name)
            expected = self._expected.pop(name, None)
            if expected is None:
                self._arrived[name] = stream.socket
        if expected is not None:
            _hand_over(stream.socket, expected)

    def forget(self, crew: str) -> None:
        """Close all that still waits for a wire of a crew."""
        with self._changing:
            self._known.pop(crew, None)
            for waiting in (self._expected, self._arrived):
                for name in [name for name in waiting if _crew(name) == crew]:
                    shut(waiting.pop(name))


def _crew(wire: str) -> str:
    return wire.partition("/")[0]


def _hand_over(arrived: socket.socket, end: socket.socket) -> None:
    """Send a socket to the worker at the other end, and close our copy."""
    with arrived, end, suppress(OSError):  # the worker is gone
        socket.send_fds(end, [b"\1"], [arrived.fileno()])
