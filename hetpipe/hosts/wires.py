"""Hands connections for wires to the workers that wait for them."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from hetpipe.hosts.door import Greeting
from hetpipe.hosts.tls import TlsStream, shut


class Wires:
    """Wires that a worker of this host waits for, or that have arrived first."""

    def __init__(self) -> None:
        self._expected: dict[str, socket.socket] = {}
        self._arrived: dict[str, socket.socket] = {}
        # Held while the dictionaries change; never while a socket waits.
        self._changing = threading.Lock()

    def expect(self, name: str) -> int:
        """Return a descriptor on which the socket of the wire `name` will come to a worker."""
        ours, theirs = socket.socketpair()
        with self._changing:
            arrived = self._arrived.pop(name, None)
            if arrived is None:
                self._expected[name] = ours
        if arrived is not None:
            _hand_over(arrived, ours)
        return theirs.detach()

    def visit(self, stream: TlsStream, greeting: Greeting) -> None:
        """Take over a connection from a door."""
        name = str(greeting["wire"])
        with self._changing:
            expected = self._expected.pop(name, None)
            if expected is None:
                self._arrived[name] = stream.socket
        if expected is not None:
            _hand_over(stream.socket, expected)

    def forget(self, crew: str) -> None:
        """Close all that still waits for a wire of a crew; names begin with the crew's."""
        with self._changing:
            for waiting in (self._expected, self._arrived):
                for name in [name for name in waiting if name.startswith(crew)]:
                    shut(waiting.pop(name))


def _hand_over(arrived: socket.socket, end: socket.socket) -> None:
    """Send a socket to the worker at the other end, and close our copy."""
    with arrived, end, suppress(OSError):  # the worker is gone
        socket.send_fds(end, [b"\1"], [arrived.fileno()])
